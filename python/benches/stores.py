"""The loaders that `loaders.py` compares: how each one stores a log, reads it in batches, and goes on from a state.

A loader is a class. `write` stores the samples of a dataset in a folder. An object of the class reads the folder:
iterating yields batches, and `state()` returns a picklable state after the last batch that was taken. A batch is
`(floats, lists)`: a float32 matrix of labels and dense features [B, F], and for every sparse feature its ids, int64,
list after list, and the length of every list. This is what a KeyedJaggedTensor needs.

Packages are imported when a loader is used, because importing some of them takes seconds and hundreds of megabytes.
"""

import importlib
import shutil
import tempfile
from pathlib import Path

import numpy
import pyarrow

import onefold

SEED = 7
SHUFFLED = 10_000
"""Samples in the buffer of a loader that shuffles within a buffer."""


class Source:
    """The samples of a dataset, for the loaders that store them in their own format."""

    def __init__(self, location):
        schema = onefold.Dataset(location).schema
        self.location = str(location)
        self.floats = schema["labels"] + schema["dense"]
        self.lists = [feature["name"] for group in schema["groups"] for feature in group["features"]]

    def reader(self):
        """Returns the samples as an Arrow stream of plain lists."""
        return pyarrow.RecordBatchReader.from_stream(onefold.Dataset(self.location).to_arrow())

    def samples(self):
        """Yields the samples as dicts of arrays."""
        for batch in self.reader():
            floats, lists = self.of_arrow(batch)
            ends = {name: numpy.cumsum(lengths) for name, (_, lengths) in lists.items()}
            for i in range(len(floats)):
                sample = {"floats": floats[i]}
                for name, (values, lengths) in lists.items():
                    sample[name] = values[ends[name][i] - lengths[i] : ends[name][i]]
                yield sample

    def of_arrow(self, rows):
        """Returns the batch in an Arrow table or record batch."""
        if isinstance(rows, pyarrow.Table):
            rows = rows.combine_chunks()
        columns = {name: rows.column(name) for name in rows.schema.names}
        columns = {name: c.chunk(0) if isinstance(c, pyarrow.ChunkedArray) else c for name, c in columns.items()}
        floats = numpy.stack([columns[name].to_numpy() for name in self.floats], axis=1)
        lists = {}
        for name in self.lists:
            offsets = columns[name].offsets.to_numpy()
            lists[name] = columns[name].values.to_numpy()[offsets[0] : offsets[-1]], numpy.diff(offsets)
        return floats, lists

    def of_samples(self, samples):
        """Returns the batch of several samples, as the collate function of a loader."""
        lists = {}
        for name in self.lists:
            own = [numpy.asarray(sample[name]) for sample in samples]
            lists[name] = numpy.concatenate(own), numpy.array([len(ids) for ids in own], numpy.int32)
        return numpy.stack([sample["floats"] for sample in samples]), lists


class Loader:
    """The part that loaders have in common. `source` is a `Source`, and `batch` the samples of a step of all ranks."""

    packages = ()
    """The modules that it needs. The version in the table is that of the first one."""
    forks = True
    """Whether its packages work in a process that is forked after their import."""
    ranks = False
    """Whether the manual of the loader promises to resume with another number of ranks."""
    shuffles = True
    """Whether it can read in another order than that of the file."""

    def __init__(self, source, folder, batch, shuffle, rank=0, world=1, state=None):
        self.source, self.folder, self.batch, self.shuffle = source, folder, batch, shuffle
        self.rank, self.world = rank, world
        self.open(state)

    @classmethod
    def version(cls):
        """Imports the packages, and returns the version of the first one."""
        return [importlib.import_module(name) for name in cls.packages][0].__version__

    def open(self, state):
        raise NotImplementedError

    def state(self):
        """Returns None if the loader has no state, and then continues from the start of the epoch."""
        return None


class Onefold(Loader):
    packages = ("onefold",)
    ranks = True
    dedupe = "off"

    @staticmethod
    def write(source, folder):
        shutil.copytree(source.location, folder)

    def open(self, state):
        options = dict(global_batch_size=self.batch, rank=self.rank, world_size=self.world, streams=4)
        self.dataset = onefold.Dataset(
            self.folder, dedupe=self.dedupe, shuffle=self.shuffle, seed=SEED, shuffle_row_groups=4, **options
        )
        if state is not None:
            self.dataset.load_state_dict(state)

    def __iter__(self):
        for batch in self.dataset:
            for feature in batch.features.values():
                feature.values, feature.sizes  # noqa: B018: makes the views
            yield batch

    def state(self):
        return self.dataset.state_dict()

    def plain(self, batch):
        """Returns a batch of this package like those of the other loaders."""
        batch = batch.expand()
        floats = numpy.concatenate([batch.labels, batch.dense], axis=1)
        return floats, {name: (own.values, own.sizes) for name, own in batch.features.items()}


class OnefoldExact(Onefold):
    dedupe = "exact"


class OnefoldWindow(Onefold):
    dedupe = "window"


class Streaming(Loader):
    """MosaicML's StreamingDataset, on MDS shards with zstd."""

    packages = ("streaming",)
    ranks = True

    @staticmethod
    def write(source, folder):
        from streaming import MDSWriter

        columns = {"floats": f"ndarray:float32:{len(source.floats)}"} | {name: "ndarray:int64" for name in source.lists}
        with MDSWriter(out=str(folder), columns=columns, compression="zstd") as writer:
            for sample in source.samples():
                writer.write(sample)

    def open(self, state):
        from streaming import StreamingDataLoader, StreamingDataset

        # Compressed shards are unpacked into `local`.
        local = Path(tempfile.gettempdir(), "local")
        own = self.batch // self.world
        dataset = StreamingDataset(
            remote=str(self.folder), local=str(local), batch_size=own, shuffle=self.shuffle, shuffle_seed=SEED,
            num_canonical_nodes=1,
        )
        self.loader = StreamingDataLoader(dataset, batch_size=own, collate_fn=self.source.of_samples)
        if state is not None:
            self.loader.load_state_dict(state)

    def __iter__(self):
        return iter(self.loader)

    def state(self):
        return self.loader.state_dict()


class LitData(Loader):
    """Lightning's litdata, on its chunks with zstd."""

    packages = ("litdata",)
    ranks = True

    @staticmethod
    def write(source, folder):
        from litdata import optimize

        optimize(
            fn=_samples_of, inputs=[source.location], output_dir=str(folder), chunk_bytes="64MB", compression="zstd",
            num_workers=1, verbose=False,
        )

    def open(self, state):
        from litdata import StreamingDataLoader, StreamingDataset

        dataset = StreamingDataset(
            str(self.folder), cache_dir=tempfile.gettempdir(), shuffle=self.shuffle, seed=SEED, drop_last=False
        )
        self.loader = StreamingDataLoader(
            dataset, batch_size=self.batch // self.world, num_workers=0, collate_fn=self.source.of_samples
        )
        if state is not None:
            self.loader.load_state_dict(state)

    def __iter__(self):
        return iter(self.loader)

    def state(self):
        return self.loader.state_dict()


def _samples_of(location):
    """Yields samples in a process of litdata."""
    yield from Source(location).samples()


class Lance(Loader):
    """LanceDB's table, read by pylance in file order."""

    packages = ("lancedb", "lance")
    forks = False
    shuffles = False

    @staticmethod
    def write(source, folder):
        import lancedb

        lancedb.connect(str(folder)).create_table("log", data=source.reader())

    def open(self, state):
        import lance

        self.dataset = lance.dataset(str(self.folder / "log.lance"))

    def __iter__(self):
        return map(self.source.of_arrow, self.dataset.to_batches(batch_size=self.batch))


class Parquet(Loader):
    """pyarrow.dataset in torch's DataLoader, on Parquet with zstd, in file order."""

    packages = ("pyarrow", "pyarrow.dataset", "torch.utils.data")
    shuffles = False

    @staticmethod
    def write(source, folder):
        from pyarrow import dataset

        options = dataset.ParquetFileFormat().make_write_options(compression="zstd")
        dataset.write_dataset(
            source.reader(), folder, format="parquet", file_options=options, max_rows_per_file=1 << 18,
            max_rows_per_group=1 << 14,
        )

    def open(self, state):
        import torch
        from pyarrow import dataset

        rows, source, batch = dataset.dataset(self.folder), self.source, self.batch

        class Batches(torch.utils.data.IterableDataset):
            def __iter__(self):
                return map(source.of_arrow, rows.to_batches(batch_size=batch))

        # By default the loader would make the tuple a list of tensors.
        self.loader = torch.utils.data.DataLoader(Batches(), batch_size=None, collate_fn=_unchanged)

    def __iter__(self):
        return iter(self.loader)


def _unchanged(batch):
    return batch


class HuggingFace(Loader):
    """Hugging Face's IterableDataset, on the Parquet files of the loader above."""

    packages = ("datasets",)
    write = Parquet.write

    def open(self, state):
        import datasets

        files = sorted(map(str, self.folder.glob("*.parquet")))
        cache = tempfile.gettempdir()
        self.dataset = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True, cache_dir=cache)
        if self.shuffle:
            self.dataset = self.dataset.shuffle(SEED, buffer_size=SHUFFLED)
        self.dataset = self.dataset.with_format("arrow")
        if state is not None:
            self.dataset.load_state_dict(state)

    def __iter__(self):
        return map(self.source.of_arrow, self.dataset.iter(batch_size=self.batch))

    def state(self):
        return self.dataset.state_dict()


class Grain(Loader):
    """Google's grain, on ArrayRecord, whose records are compressed in groups."""

    packages = ("grain", "array_record.python.array_record_module")

    @staticmethod
    def write(source, folder):
        from array_record.python import array_record_module

        folder.mkdir()
        # A record alone in its group, the default for random access, is hardly compressed.
        writer = array_record_module.ArrayRecordWriter(str(folder / "log.array_record"), "group_size:64,zstd:3")
        for sample in source.samples():
            lengths = numpy.array([len(sample[name]) for name in source.lists], numpy.int32)
            ids = [sample[name] for name in source.lists]
            writer.write(b"".join(part.tobytes() for part in (sample["floats"], lengths, *ids)))
        writer.close()

    def open(self, state):
        import grain

        rows = grain.MapDataset.source(grain.sources.ArrayRecordDataSource(str(self.folder / "log.array_record")))
        rows = rows.shuffle(seed=SEED) if self.shuffle else rows
        rows = rows.map(self._sample).to_iter_dataset()
        self.iterator = iter(rows.batch(self.batch, batch_fn=self.source.of_samples))
        if state is not None:
            self.iterator.set_state(state)

    def _sample(self, record):
        width, lists = len(self.source.floats), len(self.source.lists)
        sample = {"floats": numpy.frombuffer(record, numpy.float32, width)}
        start = 4 * (width + lists)
        for name, length in zip(self.source.lists, numpy.frombuffer(record, numpy.int32, lists, 4 * width), strict=True):
            sample[name] = numpy.frombuffer(record, numpy.int64, length, start)
            start += 8 * int(length)
        return sample

    def __iter__(self):
        return self.iterator

    def state(self):
        return self.iterator.get_state()


class TfData(Loader):
    """tf.data on TFRecord with zlib, parsed a batch at a time into ragged tensors."""

    packages = ("tensorflow",)

    @staticmethod
    def write(source, folder):
        import tensorflow as tf

        folder.mkdir()
        with tf.io.TFRecordWriter(str(folder / "log.tfrecord"), "ZLIB") as writer:
            for sample in source.samples():
                features = {"floats": tf.train.Feature(float_list=tf.train.FloatList(value=sample["floats"]))}
                for name in source.lists:
                    features[name] = tf.train.Feature(int64_list=tf.train.Int64List(value=sample[name]))
                writer.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())

    def open(self, state):
        import tensorflow as tf

        features = {name: tf.io.RaggedFeature(tf.int64) for name in self.source.lists}
        features["floats"] = tf.io.FixedLenFeature([len(self.source.floats)], tf.float32)
        rows = tf.data.TFRecordDataset(str(self.folder / "log.tfrecord"), "ZLIB")
        if self.shuffle:
            rows = rows.shuffle(SHUFFLED, seed=SEED, reshuffle_each_iteration=False)
        rows = rows.batch(self.batch).map(
            lambda records: tf.io.parse_example(records, features), num_parallel_calls=tf.data.AUTOTUNE
        )
        self.iterator = iter(rows.prefetch(tf.data.AUTOTUNE))
        self.saved = tf.train.Checkpoint(iterator=self.iterator)
        if state is not None:
            with tempfile.TemporaryDirectory() as folder:
                for name, content in state.items():
                    Path(folder, name).write_bytes(content)
                self.saved.read(f"{folder}/state").assert_consumed()

    def __iter__(self):
        for batch in self.iterator:
            lists = {name: (batch[name].values.numpy(), batch[name].row_lengths().numpy()) for name in self.source.lists}
            yield batch["floats"].numpy(), lists

    def state(self):
        with tempfile.TemporaryDirectory() as folder:
            self.saved.write(f"{folder}/state")
            return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


LOADERS = {
    "onefold, off": Onefold,
    "onefold, exact": OnefoldExact,
    "onefold, window": OnefoldWindow,
    "streaming": Streaming,
    "litdata": LitData,
    "lancedb": Lance,
    "pyarrow.dataset": Parquet,
    "datasets": HuggingFace,
    "grain": Grain,
    "tf.data": TfData,
}
