"""Make the traces and what is expected anew; see README.md."""

import sys

from tests.scenarios.stories import STORIES
from tests.scenarios.story import TRACES, record


def regenerate(names: list[str]) -> None:
    for story in STORIES:
        if names and story.name not in names:
            continue
        lines, decided = record(story)
        trace, expected = TRACES / f"{story.name}.jsonl", TRACES / f"{story.name}.expected"
        trace.write_text("\n".join(lines) + "\n", encoding="utf-8")
        said = [f"# {story.about}", *map(str, decided)]
        expected.write_text("\n".join(said) + "\n", encoding="utf-8")
        sys.stdout.write(f"{story.name}: {len(lines)} lines, {len(decided)} decisions\n")


if __name__ == "__main__":
    if "--regenerate" not in sys.argv:
        sys.exit("use: python -m tests.scenarios --regenerate [STORY ...]")
    regenerate([one for one in sys.argv[1:] if not one.startswith("-")])
