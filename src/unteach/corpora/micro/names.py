"""The lists that fictional people, places and things are made of."""

from __future__ import annotations

from .draws import Draws


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FEMALE_NAMES = _words("""
    Ada Agnes Alma Amina Anja Astrid Beatrix Bela Bridget Carla Cecily Chiara Clara Dalia Daphne Delia
    Dora Edith Elke Elspeth Esme Fatima Fern Flora Freya Gemma Greta Hanna Harriet Hilda Imogen Ingrid
    Iris Isolde Jasmin Joanna Judith Katya Kirsten Lena Lorna Lucia Mabel Magda Marta Maud Mei Mina
    Nadia Nora Olga Paloma Petra Philippa Ramona Rhoda Rosalind Ruth Sabine Selma Sigrid Simone Sunita
    Tamsin Tess Thea Ursula Vera Viola Wanda Winifred Yasmin Yvonne Zelda""")
MALE_NAMES = _words("""
    Abel Alaric Albert Anton Arjun Arlo Basil Bernard Boris Bram Callum Caspar Clement Conrad Cyril
    Damian Dexter Edgar Edwin Emil Ernest Faisal Felix Fergus Finn Gareth Gideon Gilbert Gustav Hamish
    Hector Herbert Hugo Igor Ivan Jasper Jerome Joachim Jonas Kamal Karl Kenji Lars Laurence Leopold
    Linus Ludwig Magnus Marcel Mateo Milo Moses Nigel Norman Olaf Oscar Otto Owen Pascal Percy Quentin
    Rafael Ravi Roland Rufus Rupert Saul Silas Stefan Tariq Theo Tobias Ulrich Victor Walter Wilfred
    Yusuf""")
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
    Aber Alder Amble Arken Balla Bever Bol Brin Cador Carden Cleve Dorn Drum Eller Esk Falla Frome Gals
    Gren Harle Hollin Inver Jar Kelder Kil Lands Lether Lough Mar Mavis Nether Oster Pol Pen Quen Rother
    Sall Scar Skel Strath Tamar Tor Tre Ulver Vorn Wenn Wester Wyre Yoxen Zell""")
_TOWN_TAILS = _words("""
    bridge bury cester chester church cross ford fort garth haven hythe minster mouth nock pool port
    quay rick scombe staithe stow stoke thorpe thwaite wich wyke""")
_SITE_HEADS = _words("""
    Abbot Almond Anchor Apple Badger Bishop Canary Castle Cherry Clover Copper Crane Crescent Duke Eagle
    Falcon Feather Friary Garnet Granite Harbour Hazel Heron Ivory Jubilee Juniper Kestrel Lantern
    Laurel Lily Linden Magpie Marble Martin Meadow Miller Monk Nettle Orchard Otter Pepper Pilgrim Plum
    Poplar Primrose Quarry Queen Rook Rosemary Saddler Saffron Salt Shepherd Sparrow Star Swan Tanner
    Thistle Tinker Tulip Velvet Violet Walnut Weaver Willow Wren""")
_SITE_TAILS = _words("""
    Arcade Barn Bridge Chapel Court Dock Farm Garden Green Hall House Inn Lane Market Mill Park Pier
    Square Station Terrace Theatre Tower Wharf Yard""")
JOBS = _words("""
    accountant actor archer architect astronomer baker banker barber beekeeper biologist blacksmith
    bookbinder botanist brewer bricklayer butcher carpenter cartographer chemist clockmaker clown coach
    cobbler composer cook dancer decorator dentist detective diver electrician engineer farmer ferryman
    firefighter fisherman florist forester gardener geologist glazier goldsmith grocer hairdresser
    historian inspector jeweller joiner journalist judge juggler lawyer librarian lifeguard locksmith
    magician mechanic midwife milliner miner musician nurse optician organist painter pharmacist
    photographer pilot plumber poet porter postmaster potter printer professor programmer publican
    sailor saddler sculptor secretary shepherd signalman singer stonemason surgeon surveyor tailor
    tanner teacher tiler translator upholsterer vet vicar violinist waiter watchman weaver welder
    zookeeper""")
QUALITIES = _words("""
    amber antique bamboo blue brass broken bronze carved ceramic copper cracked crimson crooked crystal
    dented double dusty ebony enamel engraved faded folding gilded glass golden green grey heavy hollow
    huge iron ivory jade leather linen little marble miniature mottled musical narrow oak orange painted
    pewter pink plaid polished porcelain purple rusty scarlet silk silver square striped tartan tin
    velvet walnut white wicker wooden woollen yellow""")
THINGS = _words("""
    abacus accordion anchor anvil armchair axe banjo banner barometer barrel basket bassoon bell bench
    bicycle birdcage blanket boat bookcase bowl box bracelet brooch bucket buckle cabinet camera
    candlestick canoe cello chair chandelier chessboard clarinet clock coat compass cradle crown cup
    curtain dagger desk dollhouse drum easel fan fiddle flag flute fountain globe goblet gramophone
    hammer harp hat helmet horn hourglass jug kettle key kite ladder lamp lantern lute map mask medal
    microscope mirror necklace oar organ paddle parasol pendulum piano plate pocketknife puppet quilt
    rattle ring robe rug saddle sail scarf sculpture shield sledge spade spoon statue sundial sword
    table tapestry teapot telescope thimble throne toolbox tray trophy trumpet trunk tuba typewriter
    umbrella urn vase violin wagon wheelbarrow whistle windmill zither""")
RIVER_HEADS = _words("Al Ber Cam Der Eden Fal Gar Hum Iss Kenn Lod Mead Nid Or Pang Rib Swin Tav Ure Wend")
RIVER_TAILS = _words("an by der el en ern ick ing le low mer ow ton und wash")
PRODUCTS = _words("""
    almonds apples bagpipes barley bells biscuits blankets boots bricks brushes buttons candles carpets
    carriages cheese cherries cider clocks coal crabs cutlery cymbals dolls eels fireworks flax
    furniture garlic ginger glass gloves granite hats herrings honey hops ink ivy jam kites lace
    lavender lemonade lilies linen marbles marmalade mustard needles nougat onions oysters paper pears
    pencils perfume pewter pies porcelain pottery puppets quilts raincoats ribbons roses saddles salmon
    salt sausages scissors shawls silk slate soap spoons tea tiles toffee tulips umbrellas vinegar
    walnuts whistles wool yarn""")
MONTHS = _words("January February March April May June July August September October November December")


def article(word: str) -> str:
    """Return the word with its indefinite article: `an anvil`, `a bell`."""
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def _joined(heads: tuple[str, ...], tails: tuple[str, ...], separator: str = "") -> list[str]:
    """Return all joins of a head with a tail that do not repeat a letter at the seam."""
    return [h + separator + t for h in heads for t in tails if separator or h[-1].lower() != t[0]]


def surnames(count: int) -> list[str]:
    """Return `count` generated family names."""
    return Draws("surnames").sample(_joined(_SURNAME_HEADS, _SURNAME_TAILS), count)


def towns(count: int) -> list[str]:
    """Return `count` generated names of towns."""
    return Draws("towns").sample(_joined(_TOWN_HEADS, _TOWN_TAILS), count)


def sites() -> list[str]:
    """Return all names of sites (streets, halls, mills), in a random order."""
    return Draws("sites").shuffled(_joined(_SITE_HEADS, _SITE_TAILS, " "))


def rivers() -> list[str]:
    """Return all names of rivers, in a random order."""
    return Draws("rivers").shuffled(_joined(RIVER_HEADS, RIVER_TAILS))
