"""Any order of requests: what is held or kept is whole and nobody else's."""

import itertools
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from powerloss.contents import SHAPE, damages_in, layout_of, write_chunk
from tensorstow.io.engine import open_engine
from tensorstow.store.inspect import open_pinned
from tensorstow.store.records import (
    HEADER_BYTES,
    ChunkRecord,
    ChunkShape,
    Content,
    Extent,
    StreamShape,
)
from tensorstow.store.store import Store

SMALL = ChunkShape(elements=64, block=32, streams=(StreamShape(4, 1),), weight=StreamShape(2, 1))
ENGINE = open_engine("threads")


class Machine(RuleBasedStateMachine):
    chunks: Bundle[ChunkRecord] = Bundle("chunks")

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="store-", dir="/var/tmp"))
        self.seed = 0
        self.held: dict[Extent, ChunkRecord] = {}
        self.kept: dict[int, tuple[ChunkRecord, ...]] = {}
        self.names: dict[str, int] = {}
        self.readers: dict[int, ExitStack] = {}

    @initialize(files=st.integers(1, 2))
    def begin(self, files: int) -> None:
        self.directories = [self.root / str(k) for k in range(files)]
        for directory in self.directories:
            directory.mkdir()
        self.store = Store.open(self.directories, ENGINE)

    @rule(target=chunks, shape=st.sampled_from([SHAPE, SMALL]), blank=st.booleans())
    def write(self, shape: ChunkShape, *, blank: bool) -> ChunkRecord:
        return self.make(shape, blank=blank)

    def make(self, shape: ChunkShape, *, blank: bool) -> ChunkRecord:
        self.seed += 1
        kind = 0 if shape is SHAPE else 1
        record = write_chunk(self.store, kind, self.seed, shape=shape, blank=blank)
        self.held[record.extent] = record
        return record

    @rule(record=consumes(chunks))
    def release(self, record: ChunkRecord) -> None:
        # One from before a crash is nobody's, though its extent may be another's by now.
        if self.held.get(record.extent) == record:
            del self.held[record.extent]
            self.store.release(record.extent)

    @rule(records=st.lists(chunks, max_size=2), data=st.data())
    def commit(self, records: list[ChunkRecord], data: st.DataObject) -> None:
        usable = {r.chunk: r for r in records if self.is_there(r)}
        layout = layout_of(1)
        layout["chunks"] += layout_of(1, SMALL)["chunks"]
        content = Content(self.seed, layout, None, None, list(usable.values()))
        keep = data.draw(st.sampled_from([None, *sorted(self.kept)]))
        number = self.store.commit(content, keep=keep).number
        for old in [n for n in self.kept if n not in {keep, *self.names.values(), *self.readers}]:
            del self.kept[old]
        self.kept[number] = tuple(content.chunks)

    @precondition(lambda self: self.kept)
    @rule(name=st.sampled_from("abc"), data=st.data())
    def pin(self, name: str, data: st.DataObject) -> None:
        if name in self.names:
            self.store.drop_snapshot(name)
            number = self.names.pop(name)
            if number not in {*self.names.values(), *self.readers, max(self.kept)}:
                del self.kept[number]
        else:
            number = data.draw(st.sampled_from(sorted(self.kept)))
            self.store.add_snapshot(name, number)
            self.names[name] = number

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        """Begin to read a generation, as another process does; or end it."""
        number = data.draw(st.sampled_from(sorted(self.kept)))
        if number in self.readers:
            self.readers.pop(number).close()
            return
        self.readers[number] = reader = ExitStack()
        assert reader.enter_context(open_pinned(self.directories[0], "A test", number))

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = Store.open(self.directories, ENGINE)
        self.held.clear()

    @rule()
    def crash(self) -> None:
        """Go on with what a killed process would have left."""
        self.end_reads()
        after = self.root.with_name(f"{self.root.name}-after")
        shutil.copytree(self.root, after)
        self.store.close()
        shutil.rmtree(self.root)
        after.rename(self.root)
        self.store = Store.open(self.directories, ENGINE)
        self.held.clear()

    @precondition(lambda self: self.kept)
    @rule(target=chunks, data=st.data())
    def resume(self, data: st.DataObject) -> ChunkRecord:
        records = self.kept[data.draw(st.sampled_from(sorted(self.kept)))]
        if not records or self.held.get(records[0].extent):
            return self.make(SMALL, blank=False)
        self.store.adopt(records[0].extent)
        self.held[records[0].extent] = records[0]
        return records[0]

    @invariant()
    def nothing_overlaps(self) -> None:
        if not hasattr(self, "store"):
            return
        space = self.store._space.extents
        kept = {r.extent for records in self.kept.values() for r in records}
        for file in range(len(self.store.files)):
            used = sorted((e.offset, e.end) for e in {*kept, *self.held} if e.file == file)
            free = zip(space.free[file]._starts, space.free[file]._ends, strict=True)
            runs = sorted([(0, HEADER_BYTES), *used, *free])
            # Every byte is the header's, somebody's, or free: none is two of them, none is lost.
            assert all(a[1] == b[0] for a, b in itertools.pairwise(runs))
            assert runs[-1][1] == space.sizes[file]

    @invariant()
    def generations_are_as_they_should_be(self) -> None:
        if hasattr(self, "store"):
            assert {s.number for s in self.store.generations()} == set(self.kept)
            pinned = {name: s.number for s in self.store.generations() for name in s.names}
            assert pinned == self.names

    def is_there(self, record: ChunkRecord) -> bool:
        kept = (r for records in self.kept.values() for r in records)
        return self.held.get(record.extent) == record or record in kept

    def end_reads(self) -> None:
        while self.readers:
            self.readers.popitem()[1].close()

    def teardown(self) -> None:
        self.end_reads()
        if hasattr(self, "store"):
            damages = damages_in(self.store)
            self.store.close()
            shutil.rmtree(self.root)
            assert not damages


Machine.TestCase.settings = settings(
    max_examples=15,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestMachine = Machine.TestCase
