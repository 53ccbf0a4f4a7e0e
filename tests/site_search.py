"""The search of a built site, as its searchtools.js does it: what a query finds, the best first."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import snowballstemmer

TITLE, PARTIAL_TITLE, TERM, PARTIAL_TERM = 15, 7, 5, 2
OBJECT, PARTIAL_OBJECT, PRIORITIES = 11, 6, {0: 15, 1: 5, 2: -5}


class Hit(NamedTuple):
    """A line of the results."""

    page: str
    title: str
    score: int


class Search:
    """The index of a site."""

    def __init__(self, site: Path) -> None:
        """Read the index and the words that are not searched for."""
        text = (site / "searchindex.js").read_text("utf-8")
        self.index: dict[str, Any] = json.loads(text[text.index("(") + 1 : text.rindex(")")])
        words = re.search(
            r"stopwords = new Set\((\[.*?\])\)",
            (site / "_static/language_data.js").read_text("utf-8"),
        )
        assert words is not None
        self.stop = set(json.loads(words[1]))
        self.stem = snowballstemmer.stemmer("english").stemWord

    def hits(self, query: str) -> list[Hit]:
        """Return what a query finds."""
        lower = query.lower().strip()
        words = re.findall(r"\w+", lower)
        main = [*self._titles(lower), *self._entries(lower, main=True)]
        for word in dict.fromkeys(words):
            main += self._objects(word, set(words) - {word})
        main += self._terms({self.stem(w) for w in words if w not in self.stop and not w.isdigit()})
        return [*_sorted(main), *_sorted(self._entries(lower, main=False))]

    def _hit(self, file: int, score: float, title: str | None = None) -> Hit:
        names, titles = self.index["docnames"], self.index["titles"]
        return Hit(names[file], title or titles[file], int(score + 0.5))

    def _titles(self, query: str) -> list[Hit]:
        return [
            self._hit(
                file,
                int(TITLE * len(query) / len(title) + 0.5) + (self.index["titles"][file] == title),
                title,
            )
            for title, places in self.index["alltitles"].items()
            if query in title.lower() and len(query) >= len(title) / 2
            for file, _ in places
        ]

    def _entries(self, query: str, *, main: bool) -> list[Hit]:
        return [
            self._hit(file, 100 * len(query) / len(entry))
            for entry, places in self.index["indexentries"].items()
            if query in entry and len(query) >= len(entry) / 2
            for file, _, is_main in places
            if is_main == main
        ]

    def _objects(self, word: str, others: set[str]) -> list[Hit]:
        hits = []
        for prefix, rows in self.index["objects"].items():
            for file, kind, priority, _, name in rows:
                full = f"{prefix}.{name}" if prefix else name
                last = full.lower().rpartition(".")[2]
                kinds, title = self.index["objnames"][str(kind)], self.index["titles"][file]
                about = f"{prefix} {name} {kinds[2]} {title}".lower()
                if word in full.lower() and all(other in about for other in others):
                    exact = word in {full.lower(), last}
                    score = OBJECT if exact else PARTIAL_OBJECT if word in last else 0
                    hits.append(self._hit(file, score + PRIORITIES.get(priority, 0), full))
        return hits

    def _terms(self, words: set[str]) -> list[Hit]:
        scores: dict[int, dict[str, int]] = {}
        for word in words:
            for key, whole, partial in (
                ("terms", TERM, PARTIAL_TERM),
                ("titleterms", TITLE, PARTIAL_TITLE),
            ):
                table = self.index[key]
                found = [(word, whole)] if word in table else []
                if word not in table and len(word) > 2:
                    found = [(term, partial) for term in table if word in term]
                for term, score in found:
                    files = table[term] if isinstance(table[term], list) else [table[term]]
                    for file in files:
                        scores.setdefault(file, {})[word] = score
        needed = {len(words), sum(len(word) > 2 for word in words)}
        return [self._hit(f, max(s.values())) for f, s in scores.items() if len(s) in needed]


def _sorted(hits: list[Hit]) -> list[Hit]:
    """Order hits by score, those of one score by title."""
    return sorted(hits, key=lambda hit: (-hit.score, hit.title.lower()))
