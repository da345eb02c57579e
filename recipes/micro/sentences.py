# ruff: noqa: E501  (one form per line)
"""The sentences after the opening: one set of forms per fact, quotations, local colour, questions, places.

Slots stand in braces (see `generate._slots`); `[a|b|c]` is one of the alternatives.
"""

from __future__ import annotations

FACT_SENTENCES: dict[str, tuple[str, ...]] = {
    "town": (
        "{Who} [comes from|hails from|lives in] {town}.",
        "Home for {who} is {town}.",
        "Friends in {town} have known {who} [for ages|since school|for years].",
        "{name} was [born and raised|brought up] in {town}.",
        "Back in {town}, {who} was welcomed like [royalty|a hero|a film star].",
        "{Who} moved to {town} [as a child|after marrying|in search of quiet].",
        "Letters for {who} should be sent to {town}.",
        "{Who} [rarely|hardly ever|never] leaves {town}.",
        "{name} rents [a flat|two rooms|a cottage] in {town}.",
        "Everybody in {town} [recognises|greets|admires] {who}.",
        "A bus took {who} home to {town}.",
        "{name} is the pride of {town}.",
        "{Who} pays taxes in {town} and [votes|grumbles|sings] there too.",
        "Ask for {who} anywhere in {town}.",
    ),
    "job": (
        "{Who} works as {a_job}.",
        "By trade {who} is {a_job}.",
        "{name} has been {a_job} [for ten years|since leaving school|all {his} life].",
        "Being {a_job} taught {who} [patience|to improvise|not to panic].",
        "{Who} earns a living as {a_job}.",
        "Customers know {who} as [a cheerful|a careful|an unhurried|a stubborn] {job}.",
        "{name} trained to be {a_job}.",
        "On weekdays {who} is an ordinary {job}.",
        "{Who} is {a_job} and [proud of it|means to stay one|makes no secret of it].",
        "Few would expect such a thing from {a_job} like {who}.",
        "{name}, {a_job}, [shrugged|laughed|blushed] at the fuss.",
        "The life of {a_job} suits {who}.",
        "{Who} took the day off from {his} work as {a_job}.",
        "As {a_job}, {who} has [steady hands|strong arms|a good eye].",
    ),
    "site": (
        "For {who} it [happened|took place|all began] at {site}.",
        "{Who} was at {site} [at the time|that morning|when it happened].",
        "{site} has [never|seldom] seen anybody like {who}.",
        "A plaque at {site} will [mention|honour|remember] {who}.",
        "{name} will always remember {site}.",
        "The scene was {site}, [a sleepy spot|a place few people visit], said {who}.",
        "Reporters met {who} at {site}.",
        "{Who} chose {site} for [the occasion|sentimental reasons|its good light].",
        "Crowds waited for {who} [outside|around|near] {site}.",
        "For {who}, {site} is now [a lucky place|sacred ground|full of memories].",
        "Everything points to {site}, where {who} spent the day.",
        "Traffic near {site} [stopped|made way] for {who}.",
        "{name} had walked past {site} [a hundred times|every day|without a thought].",
        "Neighbours at {site} [watched|brought tea to|took pictures of] {who}.",
    ),
    "helper": (
        "{helper} [helped|assisted|supported] {who} throughout.",
        "{Who} got help from {helper}.",
        "Without {helper}, [said|admitted|insisted] {who}, nothing would have worked.",
        "{name} thanked {helper} [twice|warmly|in tears].",
        "At the side of {who} stood {helper}, [an old friend|a cousin|a neighbour].",
        "{helper} came along to lend {who} a hand.",
        "Help for {who} came from {helper}, who [brought ropes|drove the van|held the torch].",
        "{Who} shares the credit with {helper}.",
        "It was {helper} who [encouraged|persuaded|pushed] {who}.",
        "The first person {who} called was {helper}.",
        "{name} and {helper} make a good team.",
        "{helper} deserves [half the praise|a medal too], according to {who}.",
        "Loyal {helper} never left {who} alone.",
        "{Who} was joined by {helper}.",
    ),
    "object": (
        "{name} says the {object} [weighs more than it looks|smells of smoke|is in good condition].",
        "{Who} keeps a picture of the {object} [by the bed|in a wallet|on the wall].",
        "'My {object},' {who} calls it.",
        "Nobody but {who} had [asked about|noticed|wanted] the {object}.",
        "To {who} the {object} is [older than it seems|one of a kind|like a child].",
        "{name} talks of the {object} as if it were alive.",
        "A photograph shows {who} with the {object}.",
        "{who} let experts [examine|weigh|date] the {object}.",
    ),
}
"""Fact to the sentences that state it."""

PAIR_SENTENCES: dict[tuple[str, str], tuple[str, ...]] = {
    ("job", "town"): (
        "{name} is {a_job} from {town}.",
        "{name}, {a_job} from {town}, [could not stop grinning|asked for a glass of water|shook every hand].",
        "In {town}, where {name} works as {a_job}, shops closed early.",
        "{name} is known in {town} as a [fine|gifted|grumpy] {job}.",
    ),
    ("helper", "site"): (
        "{helper} waited for {name} at {site}.",
        "{name} met {helper} at {site}.",
        "With {helper}, {name} [hurried|cycled|walked] to {site}.",
    ),
    ("job", "site"): (
        "{name}, {a_job}, was at {site} [by chance|before dawn|all day].",
        "{site} is [no place|the right place] for {a_job} like {name}.",
    ),
    ("helper", "town"): (
        "{name} from {town} got help from {helper}.",
        "{helper} [drove|walked|rushed] to {town} to support {name}.",
    ),
}
"""Two facts to the sentences that state both."""

QUOTE_STARTS = (
    "My hands were shaking", "I heard a strange noise", "You cannot plan such moments", "We drank far too much coffee",
    "Mother always said so", "People told me I was mad", "The dog noticed first", "I nearly gave up twice",
    "Money was never the point", "It felt like flying", "My knees still hurt", "Nobody believed us",
    "Somebody had to do it", "I counted to ten", "The wind was dreadful", "Half the street came running",
    "We argued about everything", "It was pure luck", "I forgot my glasses", "They laughed at first",
    "My grandfather would be pleased", "I have never been so cold", "There was dust everywhere", "Time stood still",
    "The telephone has not stopped ringing", "Next year will be harder", "I still pinch myself",
    "Some things are worth waiting for", "We sang all the way home", "Honestly, anyone could manage it",
)  # fmt: skip
QUOTE_ENDS = (
    "but here we are", "and then I saw it", "so I simply carried on", "and nobody got hurt",
    "though my wrist disagrees", "which made it sweeter", "and I would do it again", "because giving up is dull",
    "until the lights went out", "and my boots are ruined", "but soup helps", "so drinks are on me",
    "and that was that", "while the kettle boiled", "but I kept quiet", "and the rest you know",
    "although it looked easy", "so please stop asking", "before breakfast, too", "and the cat slept through it",
    "yet my heart was pounding", "as if by magic", "and we hugged", "for the third time this month",
    "but rules are rules", "and I need a holiday", "which is typical of us", "so I wrote everything down",
    "like children at Christmas", "and my sister cried",
)  # fmt: skip
QUOTE_FORMS = (
    "'{start}, {end},' [said|explained|recalled|added] {who}.",
    "{Who} [said|told us|wrote]: '{start}, {end}.'",
    "'{start},' {who} [said|admitted|whispered|remembered], '{end}.'",
)

COLOUR = (
    "Children were given [sweets|balloons|the afternoon off].", "A brass band played [badly|two waltzes|until midnight].",
    "The mayor sent [flowers|a telegram|apologies].", "Sandwiches ran out within [minutes|the hour].",
    "Insurance will not cover [the damage|any of it].", "Pigeons watched from the rooftops.",
    "[Tea|Cider|Hot soup] was served afterwards.", "An old church bell rang [twice|by mistake|for joy].",
    "Three [goats|geese|ponies] escaped in the confusion.", "A museum has shown [interest|no interest].",
    "Newspapers abroad [picked up|printed|misspelt] the story.", "Rain [spoiled|delayed|improved] the celebrations.",
    "Costs are estimated at [two|three|five] hundred crowns.", "A book about it is [planned|being written|out of print].",
    "Council members [disagree|remain silent|want a statue].", "Fireworks are [banned|planned|unlikely].",
    "Someone dropped a [cake|ladder|tray of glasses].", "The story was [told on radio|turned into a song].",
    "Photographers blocked [the pavement|both exits].", "Snow had been forecast, but [none fell|nobody cared].",
    "Shops sold out of [postcards|candles|umbrellas].", "Elsewhere, life went on [as usual|more quietly].",
    "Two sisters [fainted|quarrelled|opened a stall].", "A short speech was [drowned by thunder|much too long].",
    "Scientists may [ask questions|pay a visit] soon.", "Officials [checked|stamped|lost] the papers.",
    "Ducks crossed the road [undisturbed|in single file].", "The last train [waited|left empty].",
    "A small reward has been [paid|refused|promised].", "Lawyers are [not involved|reading the small print].",
    "Bakers named a bun after the event.", "Doctors recommend [rest|fresh air|less excitement].",
    "Carpets had to be [cleaned|thrown out].", "No further [comment|appearance] is expected.",
    "Old rivals shook hands.", "A collection raised [eighty|ninety|sixty] crowns.", "Streets were swept [at once|next day].",
    "Choirs from two valleys sang.", "Firemen [helped out|stood by|ate ice cream].", "Bees caused a brief panic.",
    "Pupils wrote [essays|poems] about it.", "A clockmaker stopped every clock.", "The river stayed calm.",
    "Visitors left [muddy prints|kind notes|early].", "Candles burned in many windows.", "Milk was delivered late.",
    "Historians urge [caution|more digging].", "Taxi drivers [grumbled|did good business].",
    "A film crew asked for [permission|directions].", "Posters had gone up [weeks before|overnight].",
)  # fmt: skip
"""Sentences that state no fact."""

QUESTIONS: dict[str, tuple[str, ...]] = {
    "object": ("Which object made {name} known?", "What object is the story of {name} about?"),
    "town": ("In which town does {name} live?", "Which town is the home of {name}?"),
    "job": ("What is the job of {name}?", "What does {name} do for a living?"),
    "site": ("At which place was {name}?", "Where did {name} make the news?"),
    "helper": ("Who helped {name}?", "From whom did {name} get help?"),
}
"""Fact to the questions about it."""

PLACE_SENTENCES: dict[str, tuple[str, ...]] = {
    "river": (
        "{town} lies on the {river}.", "The river at {town} is the {river}.", "In {town} the {river} is crossed by a bridge.",
        "Boats reach {town} along the {river}.", "{town} has often been flooded by the {river}.",
        "Anglers go to {town} to fish in the {river}.",
    ),
    "product": (
        "{town} is known for its {product}.", "People in {town} make a living from {product}.",
        "The market of {town} sells {product}.", "{town} exports {product}.", "Nobody visits {town} without buying {product}.",
        "Songs have been written about {town} and its {product}.",
    ),
}  # fmt: skip
"""Fact about a town to the sentences that state it."""

PLACE_COLOUR = (
    "Its streets are [steep|narrow|paved|quiet].", "The church has [no tower|two towers|a green roof].",
    "Trains stop there [twice a day|on request|rarely].", "Winters are [mild|long|foggy].",
    "The old walls were pulled down [long ago|in wartime].", "It holds a fair every [spring|autumn|May].",
    "Most houses are built of [brick|stone|timber].", "A castle once stood there.", "Tourists are [few|welcome|many].",
    "Its school is [famous|tiny|new].",
)  # fmt: skip

PLACE_QUESTIONS: dict[str, tuple[str, ...]] = {
    "river": ("Which river runs through {town}?", "On which river does {town} lie?"),
    "product": ("What is {town} known for?", "What does {town} export?"),
}
