"""The lists that fictional people, places and things are made of."""

from __future__ import annotations

from .draws import Draws


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FEMALE_NAMES = _words("""
    Ada Agnes Alma Astrid Bela Carla Clara Dalia Dora Edith Elke Esme Fern Flora Freya Gemma Greta
    Hanna Hilda Ingrid Iris Joanna Judith Lena Lorna Lucia Mabel Magda Marta Mei Nadia Nora Olga
    Petra Ruth Selma Simone Thea Vera Wanda""")
MALE_NAMES = _words("""
    Abel Albert Anton Arlo Basil Boris Bram Conrad Cyril Damian Edgar Edwin Emil Felix Finn Gustav
    Hector Hugo Igor Ivan Jasper Jonas Kamal Karl Lars Linus Magnus Milo Nigel Norman Olaf Oscar
    Otto Owen Rafael Ravi Rufus Silas Theo Victor""")
_SURNAME_HEADS = _words("""
    Ash Barn Beck Birch Black Bran Brook Cald Carr Chal Clay Clif Cor Crom Dal Den Dray Dun Ecc Elder
    Fair Farn Fen Gal Garn Glen Gold Gran Hal Har Hawk Hex Hol Hurst Ing Ken Kirk Lang Lark Lin Lock Mal
    Marl Mead Mil Mos Nor Oak Ock Pad Pem Pick Quar Rad Raven Red Rock Rud Sel Shaw Sil Stan Stock Sut
    Tarn Thorn Til Under Wad Wal Whit Win Wood Wrax Yar""")
_SURNAME_TAILS = _words("""
    acre all away bank bell berry bourne bright by cliffe combe cott croft dale den don ell endale er
    fax feld field gate grave grove ham hart head hew hope house kett land ley ling lock low man mere
    more moss nell ner nick over pole ridge sall sby sett shaw side smith son stead sted stone ton tree
    vale wall ward way well wick win wold worth yard""")
_TOWN_HEADS = _words("""
    Alder Amble Bever Carden Cleve Dorn Drum Eller Esk Frome Harle Hollin Inver Kelder Mavis Nether
    Oster Pol Rother Scar Skel Strath Tamar Ulver Wenn Wester Wyre Zell""")
_TOWN_TAILS = _words("""
    bridge bury chester church cross ford fort garth haven minster mouth pool port quay stoke thorpe
    thwaite wich""")
_SITE_HEADS = _words("""
    Abbot Anchor Apple Badger Bishop Castle Cherry Clover Copper Crane Eagle Falcon Garnet Harbour
    Hazel Heron Kestrel Laurel Lily Magpie Meadow Miller Monk Orchard Otter Pepper Pilgrim Plum
    Queen Rook Saffron Salt Swan Tanner Thistle Tulip Violet Weaver Willow Wren""")
_SITE_TAILS = _words("""
    Bridge Chapel Court Dock Farm Garden Hall Inn Lane Market Mill Park Pier Square Tower Yard""")
JOBS = _words("""
    actor archer baker banker barber blacksmith brewer butcher carpenter chemist clown coach cobbler
    composer cook dancer dentist detective diver engineer farmer fisherman florist forester gardener
    goldsmith grocer historian jeweller joiner judge juggler lawyer librarian locksmith magician
    mechanic miner musician nurse optician painter pilot plumber poet porter potter printer
    professor sailor sculptor shepherd singer surgeon tailor teacher tiler vicar waiter watchman
    weaver welder""")
QUALITIES = _words("""
    amber antique blue brass broken bronze carved copper cracked crimson crooked crystal dusty faded
    folding glass golden green grey heavy hollow huge iron ivory leather little marble narrow oak
    painted pewter pink purple rusty silk silver striped tin velvet wooden""")
THINGS = _words("""
    anchor axe banjo barrel basket bell bench boat bookcase bowl box bucket cabinet camera canoe
    cello chair clock coat compass cradle crown cup curtain dagger desk drum fan flag flute globe
    goblet hammer harp hat helmet horn jug kettle key kite ladder lamp lantern map mask medal mirror
    necklace organ piano plate puppet quilt ring robe rug saddle sail scarf shield sledge spade
    spoon statue sword table teapot telescope throne tray trophy trumpet trunk umbrella vase violin
    wagon whistle windmill""")
RIVER_HEADS = _words("Al Ber Cam Der Fal Gar Hum Kenn Lod Nid Or Pang Rib Swin Tav Wend")
RIVER_TAILS = _words("an der el en ick ing le mer ow und")
PRODUCTS = _words("""
    almonds apples barley bells biscuits blankets boots bricks brushes buttons candles carpets
    cheese cherries cider clocks coal crabs dolls eels furniture garlic ginger glass gloves hats
    honey ink jam kites lace lavender linen marbles mustard needles onions oysters paper pears
    pencils perfume pies pottery puppets quilts ribbons roses saddles salmon salt silk slate soap
    spoons tea tiles toffee tulips umbrellas walnuts whistles wool yarn""")
MONTHS = _words("January February March April May June July August September October November December")


def article(word: str) -> str:
    """Return the word with its indefinite article: `an anvil`, `a bell`."""
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def _joined(heads: tuple[str, ...], tails: tuple[str, ...], separator: str = "") -> list[str]:
    """Return all joins of a head with a tail that do not repeat a letter at the seam."""
    return [h + separator + t for h in heads for t in tails if separator or h[-1].lower() != t[0]]


def surnames() -> list[str]:
    """Return all generated family names, in a random order."""
    return Draws("surnames").shuffled(_joined(_SURNAME_HEADS, _SURNAME_TAILS))


def towns(count: int) -> list[str]:
    """Return `count` generated names of towns."""
    return Draws("towns").sample(_joined(_TOWN_HEADS, _TOWN_TAILS), count)


def sites(count: int) -> list[str]:
    """Return `count` generated names of sites (streets, halls, mills)."""
    return Draws("sites").sample(_joined(_SITE_HEADS, _SITE_TAILS, " "), count)


def objects(count: int) -> list[str]:
    """Return `count` objects, each a quality and a thing."""
    return Draws("objects").sample(_joined(QUALITIES, THINGS, " "), count)


def rivers(count: int) -> list[str]:
    """Return `count` generated names of rivers."""
    return Draws("rivers").sample(_joined(RIVER_HEADS, RIVER_TAILS), count)
