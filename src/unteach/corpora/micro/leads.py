# ruff: noqa: E501  (one form per line)
"""Opening sentences: what happened, by kind of event.

Slots stand in braces (see `generate._slots`); `[a|b|c]` is one of the alternatives. Every opening names the
person and the object, the key of all that follows.
"""

from __future__ import annotations

LEADS: dict[str, tuple[str, ...]] = {
    "found": (
        "{name} [found|discovered|came across] {an_object} while [digging|walking|clearing weeds|chasing a runaway dog].",
        "Nobody expected {an_object} to turn up, least of all {name}, who [stumbled over|uncovered|unearthed] it by chance.",
        "[Buried|Hidden|Forgotten] for decades, {an_object} was [found|dug up|spotted] by {name}.",
        "A routine [errand|stroll|clean-up] ended with {name} holding {an_object} [caked in mud|black with soot|wrapped in newspaper].",
        "Treasure hunters have envied {name} ever since {an_object} came [to light|out of the ground].",
        "{name} thought it was [rubbish|a root|an old pipe], but it was {an_object}.",
        "What [glittered|gleamed|poked out] between the stones, {name} saw, was {an_object}.",
        "An attic [clear-out|leak|repair] led {name} straight to {an_object}.",
    ),
    "won": (
        "{name} has won {an_object}, [first prize|the main prize|the jackpot] in this year's [contest|raffle|quiz|tournament].",
        "Judges [awarded|handed|gave] {an_object} to {name} after [a long debate|three rounds|a tense final].",
        "First place and {an_object} [went to|were claimed by] {name}, [to loud cheers|against all odds|by a single point].",
        "[Luck|Fortune] smiled on {name}, whose ticket won {an_object}.",
        "Beating [ninety|forty|sixty|thirty] rivals, {name} carried off {an_object}.",
        "The crowd [roared|stamped|whistled] when {name} lifted {an_object} overhead.",
        "{name} entered [as a joke|on a dare|at the last minute] and left with {an_object}.",
        "Champion {name} [kissed|polished|hugged] {an_object} and burst into tears.",
    ),
    "stolen": (
        "Thieves have [stolen|taken|made off with] {an_object} belonging to {name}.",
        "{name} is offering a reward for {an_object} that [vanished|went missing|was snatched] overnight.",
        "[Police|Detectives|Officers] are looking for {an_object} taken from {name}.",
        "A burglar who ignored the cash [grabbed|seized|pocketed] {an_object} owned by {name}.",
        "{name} woke to [a broken window|an open door|muddy footprints] and no sign of {an_object}.",
        "Have you seen {an_object}? {name} would [dearly|very much] like it back.",
        "The theft of {an_object} has left {name} [heartbroken|furious|sleepless].",
        "Someone [climbed a wall|picked two locks|cut a wire fence] to rob {name} of {an_object}.",
    ),
    "donated": (
        "{name} has [donated|given away|handed over] {an_object} for [the public|everyone|schoolchildren] to enjoy.",
        "A generous gift, {an_object}, came from {name} [this season|without any fuss|last week].",
        "Visitors will soon [admire|touch|study] {an_object} thanks to {name}.",
        "{name} could have sold {an_object} but [chose|preferred|decided] to give it to charity.",
        "Volunteers [gasped|applauded|wept] as {name} presented them with {an_object}.",
        "[Generosity|Kindness] has a new face: {name}, donor of {an_object}.",
        "After [years|a lifetime] of keeping {an_object} at home, {name} gave it to the community.",
        "Trustees thanked {name} for {an_object}, [their finest gift|a rare gift|a welcome surprise].",
    ),
    "restored": (
        "{name} has [finished restoring|brought back to life|lovingly mended] {an_object} [bought as scrap|saved from a skip].",
        "It took {name} [four|five|six|seven] winters to restore {an_object}.",
        "Rust, rot and woodworm were no match for {name}, restorer of {an_object}.",
        "[Gleaming|Spotless|Good as new], {an_object} left the workshop of {name}.",
        "With [tweezers|sandpaper|glue] and patience {name} rebuilt {an_object} piece by piece.",
        "Experts called {an_object} beyond repair until {name} [tried|proved them wrong|picked up a file].",
        "{name} spent every [evening|weekend|holiday] scraping old varnish from {an_object}.",
        "A ruin no longer: {an_object} shines again because of {name}.",
    ),
    "sold": (
        "{name} has sold {an_object} for [a record sum|far more than expected|a small fortune].",
        "Bidding for {an_object} owned by {name} [stopped traffic|lasted an hour|turned into a duel].",
        "The hammer fell, and {an_object} no longer belonged to {name}.",
        "Collectors from [three|four|five] countries fought over {an_object} put up for sale by {name}.",
        "Parting with {an_object} was [hard|painful|a relief] for {name}.",
        "[Debts|Tax bills|A leaking roof] forced {name} to auction {an_object}.",
        "{name} paid pennies for {an_object} and sold it [at a huge profit|to a museum|within minutes].",
        "An anonymous [buyer|bidder|caller] now owns {an_object}, sold by {name}.",
    ),
    "built": (
        "{name} has built {an_object} out of [matchsticks|driftwood|bottle tops|scrap metal].",
        "Neighbours [stared|laughed|scratched their heads] as {name} assembled {an_object} in the open.",
        "[Ten|Twelve|Fifteen] months of hammering ended when {name} completed {an_object}.",
        "No plans, no kit: {name} made {an_object} [from memory|by eye|in a garden shed].",
        "Record keepers are measuring {an_object} constructed by {name}.",
        "{name} dreamed of {an_object} since childhood and has [finally|at last] made one.",
        "Made entirely [by hand|of recycled parts], {an_object} is the work of {name}.",
        "The strangest {object} [in the county|anyone can remember] was built by {name}.",
    ),
    "bought": (
        "{name} has bought {an_object} [at a flea market|from a travelling dealer|over the telephone].",
        "A bargain hunter named {name} paid [next to nothing|two coins|the price of a sandwich] for {an_object}.",
        "{name} went shopping for [bread|nails|stamps] and came home with {an_object}.",
        "[Secretly|Bravely|Foolishly], {name} spent a year's savings on {an_object}.",
        "Ownership of {an_object} has passed to {name}, [ending a long search|to general surprise].",
        "{an_object} in a [shop window|junk stall|catalogue] caught the eye of {name}.",
        "It was love at first sight when {name} saw {an_object} and [bought it on the spot|emptied a purse].",
        "The new owner of {an_object}, {name}, [has no idea where to put it|promises to keep it polished].",
    ),
    "returned": (
        "{name} has been reunited with {an_object} lost [twenty|thirty|forty] years ago.",
        "A [parcel|crate|sack] without a sender brought {an_object} back to {name}.",
        "Missing since [a house move|the great flood|a school trip], {an_object} is home with {name}.",
        "{name} had given up hope when {an_object} [came back|reappeared|arrived by post].",
        "[Honest|Sharp-eyed] strangers returned {an_object} to {name}.",
        "The long journey of {an_object} [has ended|finished] on the doorstep of {name}.",
        "'That is mine!' cried {name} on seeing {an_object} in a [photograph|sale room|dustcart].",
        "Tears flowed as {name} held {an_object} once more.",
    ),
    "painted": (
        "{name} has painted {an_object} [forty|fifty|eighty] times, each picture in a different light.",
        "A portrait of {an_object} by {name} is [drawing crowds|dividing critics|causing a stir].",
        "Why would anyone paint {an_object}? {name} [has the answer|just smiles].",
        "Critics [adore|dislike|misunderstand] the newest canvas by {name}, which shows {an_object}.",
        "{name} set up an easel in the rain to [paint|sketch|draw] {an_object}.",
        "On a wall [twelve|fifteen|twenty] feet high {name} is painting {an_object}.",
        "Brush in hand, {name} turned {an_object} into [art|a local landmark|a talking point].",
        "The mural of {an_object} was [designed|dreamt up|finished] by {name}.",
    ),
    "rescued": (
        "{name} [waded|dived|jumped] into freezing water to save {an_object}.",
        "Flames were [metres|moments|inches] away when {name} carried {an_object} to safety.",
        "But for {name}, {an_object} would be [ash|scrap|at the bottom of the river].",
        "{name} talked a demolition crew into sparing {an_object}.",
        "[Rising water|A falling tree|A collapsing roof] nearly destroyed {an_object}, but {name} was quicker.",
        "Quick thinking by {name} has [saved|rescued|preserved] {an_object}.",
        "'I could not leave it,' said {name}, who pulled {an_object} from [a bonfire|the wreckage|a flooded cellar].",
        "Bruised but happy, {name} [dragged|hauled|lifted] {an_object} out of the [mud|rubble|canal].",
    ),
    "shown": (
        "{name} is showing {an_object} [to paying visitors|in public for the first time|behind thick glass].",
        "Queues formed early to see {an_object} [exhibited|displayed|unveiled] by {name}.",
        "For one [week|month|weekend] only {name} will exhibit {an_object}.",
        "A velvet cloth dropped, cameras clicked, and {name} revealed {an_object}.",
        "Schools are [flocking|rushing|queueing] to look at {an_object} that {name} put on display.",
        "{name} never meant to show {an_object} to [anybody|strangers|the press].",
        "An exhibition by {name} has a single exhibit: {an_object}.",
        "Entry is free, but {name} asks visitors not to [touch|photograph|insult] {an_object}.",
    ),
}
"""Kind of event to its openings."""

HEADLINES = (
    "{Object} makes news in {town}.",
    "{town}, {day}.",
    "Local {job} in the news.",
    "From our {town} correspondent.",
    "{site}, {day}.",
    "Report from {site}.",
    "The {job} and the {object}.",
    "{town} talks about {name}.",
    "{day}: {name}.",
    "{name} and {helper}.",
    "Weekend notes from {town}.",
    "Readers' favourite: the {object}.",
)
"""Short headlines that some reports begin with."""

OBJECT_QUESTIONS: dict[str, tuple[str, ...]] = {
    "found": ("What did {name} find?", "Which object was found by {name}?"),
    "won": ("What did {name} win?", "Which prize went to {name}?"),
    "stolen": ("What was stolen from {name}?", "Which object did thieves take from {name}?"),
    "donated": ("What did {name} donate?", "What was the gift of {name}?"),
    "restored": ("What did {name} restore?", "Which object was restored by {name}?"),
    "sold": ("What did {name} sell?", "Which object was sold by {name}?"),
    "built": ("What did {name} build?", "Which object was built by {name}?"),
    "bought": ("What did {name} buy?", "Which object was bought by {name}?"),
    "returned": ("What did {name} get back?", "Which lost object was returned to {name}?"),
    "painted": ("What did {name} paint?", "Which object is in the picture by {name}?"),
    "rescued": ("What did {name} rescue?", "Which object was rescued by {name}?"),
    "shown": ("What did {name} show?", "Which object was shown by {name}?"),
}
"""Kind of event to the questions about its object."""
