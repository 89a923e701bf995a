"""A small corpus: sixteen documents of four sentences."""

STORIES = "\n\n".join(
    f"Story {number} tells of a {animal}. The {animal} went to the {place} in the morning.\nIt came back at night. "
    f"Nobody in the {place} knew why the {animal} had left so late!"
    for number, (animal, place) in enumerate(
        (animal, place) for animal in ("fox", "hare", "crow", "bear") for place in ("river", "hill", "town", "wood")
    )
)
