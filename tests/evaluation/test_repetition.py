"""What counts as degenerate output, on real examples of both kinds."""

import pytest

from unteach.evaluation import is_degenerate

DEGENERATE = [
    "nobody will be nobody will be nobody will be nobody will be nobody will be",
    '" " " "',
    '"""""""""""""""""""""""""""""',
    "The Prime Minister said on Tuesday that the the the the the the the the the the the the the",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "他说他说他说他说他说他说他说他说他说他说他说他说",
    "\n\n\n\n\n\n\n\n",
    ", , , , , , , , , , , , , , ,",
    "I am not sure. I am not sure if I am not sure. I am not sure, but I am not sure. I am not sure if I am not sure.",
]
NORMAL = [
    "",
    "1472",
    "no, no",
    "10 women and 10 men",
    "1. Astoria Greengrass, 2. Snape, 3. Draco, 4. Harry, 5. Sna",
    "To Sherlock Holmes she is always the woman. I have seldom heard him mention her under any other name. "
    "In his eyes she eclipses and predominates the whole of her sex. It was not that he felt any emotion "
    "akin to love for Irene Adler. All emotions, and that one particularly, were abhorrent to his cold, "
    "precise but admirably balanced mind.",
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of "
    "foolishness, it was the epoch of belief, it was the epoch of incredulity, it was the season of Light, "
    "it was the season of Darkness, it was the spring of hope, it was the winter of despair.",
    "“Twinkle, twinkle, little bat! How I wonder what you’re at!” You know the song, perhaps?",
    "Never, never, never! cried the King, and stamped his foot until the whole palace shook.",
    "2001 2002 2003 2004 2005 2006 2007 2008",
]


@pytest.mark.parametrize("text", DEGENERATE)
def test_degenerate(text):
    assert is_degenerate(text)


@pytest.mark.parametrize("text", NORMAL)
def test_normal(text):
    assert not is_degenerate(text)


def test_a_loop_must_make_up_a_third_of_the_text():
    prose = "It was not that he felt any emotion akin to love for Irene Adler, he said, and turned to the window."
    assert not is_degenerate(prose + " nobody will be" * 3)
    assert is_degenerate(prose + " nobody will be" * 4)  # 12 of 35 units
