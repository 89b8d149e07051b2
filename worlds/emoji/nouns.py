"""The nouns that all five packages draw, by their names there."""

NOUNS = tuple(
    """
    ant bat bear bird butterfly camel cat chicken cow crab crocodile deer dog dolphin dragon
    duck eagle elephant fish fox frog goat gorilla horse koala lion lizard monkey mouse
    octopus owl panda penguin pig rabbit rhinoceros rooster scorpion shark shrimp snail
    snake spider squid tiger turkey turtle unicorn whale wolf
    bouquet cactus maple-leaf mushroom palm-tree rose sunflower tulip evergreen-tree
    avocado bacon banana birthday-cake bread candy carrot cherries chestnut cookie croissant
    cucumber doughnut egg eggplant grapes hamburger hot-dog lemon lollipop melon pancakes
    peach pear pineapple pizza popcorn potato strawberry sushi taco tomato watermelon
    wine-glass french-fries ice-cream
    balloon basketball boxing-glove trophy volleyball ribbon joystick crystal-ball
    soccer-ball baseball skis
    backpack bed bell bomb books briefcase camera candle crown door dress drum envelope
    flashlight glasses guitar hammer handbag jeans key laptop light-bulb lipstick megaphone
    microphone microscope necktie newspaper paintbrush pencil printer purse ring saxophone
    scissors shield sunglasses telephone telescope television toilet top-hat trumpet violin
    wrench bathtub battery coffin dagger t-shirt shopping-cart high-heeled-shoe running-shoe
    airplane ambulance anchor automobile bicycle bus canoe castle church delivery-truck
    factory fire-engine fountain helicopter hospital house locomotive motorcycle mountain
    rocket sailboat satellite school ship snowman speedboat stopwatch sun star crescent-moon
    taxi tent tractor umbrella volcano watch alarm-clock ferris-wheel
    ghost skull red-heart
    """.split()
)
MANY = frozenset(  # named with "some"
    "bacon books cherries french-fries glasses grapes jeans pancakes popcorn scissors skis "
    "sunglasses sushi".split()
)


def words(noun: str) -> str:
    """A noun in a caption: "a hot dog", "an owl", "some books"."""
    spoken = noun.replace("-", " ") if noun != "t-shirt" else noun
    if noun in MANY:
        return f"some {spoken}"
    return f"an {spoken}" if spoken[0] in "aeiou" and noun != "unicorn" else f"a {spoken}"
