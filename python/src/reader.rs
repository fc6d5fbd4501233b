//! The Python classes for datasets, iterators over them, and batches.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use arrow::array::{Array, StructArray};
use arrow::datatypes::{Field, Schema};
use clap::ValueEnum;
use onefold_base::sync::locked;
use onefold_datasets::{PartitionFilter, parse_time};
use onefold_ikjt::preprocess::PreprocessConfig;
use onefold_ikjt::{Batches, Error, PackedBatch, Position, Rank, Shuffle, Step};
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyTuple};
use pyo3_arrow::ffi::{to_array_pycapsules, to_schema_pycapsule};

use crate::errors::{of_library, wrong_option, wrong_process};
use crate::memory::Memory;
use crate::process::{OfProcess, workers};

/// The time for which the interpreter waits for a batch before it checks for signals.
const SLICE: Duration = Duration::from_millis(50);

/// The time for which the end of an iteration waits for its threads.
const PATIENCE: Duration = Duration::from_secs(2);

const FORKED: &str = "it was made in another process, before a fork, and has no threads in this one\n  \
                      hint: begin a new iteration in this process; a dataset may be used after a fork, its iterators may not";

/// A dataset that is open for reading.
#[pyclass(frozen, module = "onefold._onefold")]
pub(crate) struct Reader {
    reader: OfProcess<onefold_ikjt::Reader>,
}

/// Parses an option that has a few possible values.
fn choice<T: ValueEnum>(py: Python<'_>, option: &str, given: &str) -> PyResult<T> {
    T::from_str(given, false).map_err(|_| {
        let choices = T::value_variants().iter().filter_map(T::to_possible_value);
        let names: Vec<String> = choices.map(|choice| format!("`{}`", choice.get_name())).collect();
        wrong_option(py, &format!("`{option}` is `{given}`"), &format!("give one of {}", names.join(", ")))
    })
}

fn to_json<T: serde::Serialize>(value: &T) -> PyResult<String> {
    serde_json::to_string(value).map_err(|error| PyValueError::new_err(error.to_string()))
}

fn to_position(py: Python<'_>, json: &str) -> PyResult<Position> {
    serde_json::from_str(json).map_err(|error| {
        let hint = "give what `state_dict()` returned; states of other versions cannot be resumed";
        wrong_option(py, &format!("this is no position of a dataset: {error}"), hint)
    })
}

impl Reader {
    fn get(&self, py: Python<'_>) -> PyResult<&onefold_ikjt::Reader> {
        self.reader.get().ok_or_else(|| wrong_process(py, FORKED))
    }
}

#[pymethods]
impl Reader {
    #[new]
    #[pyo3(signature = (location, *, global_batch_size, rank, world_size, streams, shuffle, shuffle_row_groups,
                        shuffle_within, dedupe, preprocess, features, keep, tail, partitions, snapshot, verify,
                        table_rows, timestamps, labels_as_of))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of Python, given by `Dataset` alone")]
    fn new(
        py: Python<'_>,
        location: PathBuf,
        global_batch_size: usize,
        rank: usize,
        world_size: usize,
        streams: Option<usize>,
        shuffle: Option<u64>,
        shuffle_row_groups: usize,
        shuffle_within: &str,
        dedupe: &str,
        preprocess: Option<PathBuf>,
        features: Option<Vec<String>>,
        keep: Option<Vec<String>>,
        tail: &str,
        partitions: &str,
        snapshot: Option<u64>,
        verify: bool,
        table_rows: BTreeMap<String, u64>,
        timestamps: bool,
        labels_as_of: Option<&str>,
    ) -> PyResult<Self> {
        let within = choice(py, "shuffle_within", shuffle_within)?;
        let keep = keep.unwrap_or_default();
        // The reader's own error would use the name of its own option.
        if let Some((_, name)) = keep.iter().enumerate().find(|(i, name)| keep[..*i].contains(name)) {
            let message = format!("`keep` names the column `{name}` twice");
            return Err(wrong_option(py, &message, "name every column once"));
        }
        let labels_as_of = labels_as_of.map(parse_time).transpose().map_err(|message| {
            wrong_option(py, &format!("`labels_as_of`: {message}"), "give a time in UTC, or another offset")
        })?;
        let checks = onefold_ikjt::Checks { verify, table_rows, ..onefold_ikjt::Checks::default() };
        let options = onefold_ikjt::ReaderOptions {
            streams,
            tail: choice(py, "tail", tail)?,
            shuffle: shuffle.map(|seed| Shuffle { seed, row_groups: shuffle_row_groups, within }),
            dedupe: choice(py, "dedupe", dedupe)?,
            snapshot,
            partitions: PartitionFilter::parse(partitions).map_err(|error| of_library(py, &error))?,
            features,
            kept: keep,
            timestamps,
            labels_as_of,
            ..onefold_ikjt::ReaderOptions::new(global_batch_size)
        };
        let workers = workers(py)?;
        let opened = py.detach(|| {
            let preprocess = preprocess.as_deref().map(PreprocessConfig::load).transpose()?;
            let options = onefold_ikjt::ReaderOptions { preprocess, ..options };
            let request = onefold_ikjt::ReadRequest { options, checks, rank: Rank { rank, world_size } };
            onefold_ikjt::Reader::open(Path::new(&location), request, &workers)
        });
        let reader = opened.map_err(|error| of_library(py, &error))?;
        Ok(Self { reader: OfProcess::new(reader) })
    }

    /// Returns the number of samples that this rank reads in an epoch.
    fn samples(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.get(py)?.samples())
    }

    /// Returns the number of steps of an epoch.
    fn steps(&self, py: Python<'_>, epoch: u64) -> PyResult<u64> {
        let reader = self.get(py)?;
        py.detach(|| reader.steps(epoch)).map_err(|error| of_library(py, &error))
    }

    /// Returns the plan of an epoch as JSON.
    fn plan(&self, py: Python<'_>, epoch: u64) -> PyResult<String> {
        let reader = self.get(py)?;
        to_json(&py.detach(|| reader.plan(epoch)).map_err(|error| of_library(py, &error))?)
    }

    /// Returns the schema of the batches as JSON.
    fn schema(&self, py: Python<'_>) -> PyResult<String> {
        to_json(self.get(py)?.schema())
    }

    /// Returns the number of the snapshot, and the identity of the dataset.
    fn snapshot(&self, py: Python<'_>) -> PyResult<(u64, String)> {
        let snapshot = self.get(py)?.snapshot();
        Ok((snapshot.snapshot, snapshot.dataset.clone()))
    }

    /// Returns the position before an epoch as JSON.
    fn position(&self, py: Python<'_>, epoch: u64) -> PyResult<String> {
        to_json(&self.get(py)?.position(epoch))
    }

    /// Raises an error for a position of another dataset or of other options.
    fn check(&self, py: Python<'_>, position: &str) -> PyResult<()> {
        let position = to_position(py, position)?;
        let reader = self.get(py)?;
        // The number of steps of the position's epoch may have to be counted or requested from a service.
        py.detach(|| reader.check(&position)).map_err(|error| of_library(py, &error))
    }

    /// Returns an iterator over the first batch after a position, and every `every`-th batch after it.
    fn resume(&self, py: Python<'_>, position: &str, every: u64) -> PyResult<BatchIterator> {
        let position = to_position(py, position)?;
        let reader = self.get(py)?;
        let batches = py
            .detach(|| reader.resume_packed_every(every, &position))
            .map_err(|error| of_library(py, &error))?;
        Ok(BatchIterator { steps: batches.steps(), batches: OfProcess::new(Mutex::new(Some(batches))) })
    }
}

/// Ends an epoch and its threads. Threads that still wait for a file or an object store after [`PATIENCE`] are left to
/// end by themselves, because interrupting a wait must not cause another wait.
fn end(batches: Batches<PackedBatch>) {
    let (sender, ended) = mpsc::channel::<()>();
    let work = move || {
        drop(batches);
        drop(sender);
    };
    if std::thread::Builder::new().name("onefold-end".to_owned()).spawn(work).is_ok() {
        // The sender sends nothing. It is dropped after the batches.
        let _ = ended.recv_timeout(PATIENCE);
    }
}

/// An iterator over the batches of an epoch.
#[pyclass(frozen, module = "onefold._onefold")]
pub(crate) struct BatchIterator {
    batches: OfProcess<Mutex<Option<Batches<PackedBatch>>>>,
    steps: u64,
}

impl BatchIterator {
    fn batches(&self, py: Python<'_>) -> PyResult<&Mutex<Option<Batches<PackedBatch>>>> {
        self.batches.get().ok_or_else(|| wrong_process(py, FORKED))
    }
}

#[pymethods]
impl BatchIterator {
    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Block>> {
        let batches = self.batches(py)?;
        let step = loop {
            // The thread is also detached while it waits for the lock, because another thread may hold it during its
            // own wait.
            let came = py.detach(|| match &mut *locked(batches) {
                Some(batches) => batches.wait_for_next(SLICE).then(|| batches.next()),
                None => Some(None),
            });
            match came {
                Some(step) => break step,
                None => py.check_signals()?,
            }
        };
        match step {
            Some(Ok(Step { batch, position })) => {
                Ok(Some(Block { memory: Memory::new(batch), position: Some(position) }))
            }
            Some(Err(error)) => {
                self.close(py)?;
                Err(of_library(py, &error))
            }
            None => {
                self.close(py)?;
                Ok(None)
            }
        }
    }

    /// Returns the number of steps of the epoch.
    #[getter]
    fn steps(&self) -> u64 {
        self.steps
    }

    /// Ends the iteration and its threads.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let batches = self.batches(py)?;
        py.detach(|| {
            let batches = locked(batches).take();
            batches.map(end)
        });
        Ok(())
    }
}

impl Drop for BatchIterator {
    fn drop(&mut self) {
        let Some(batches) = self.batches.get() else { return };
        let mut batches = locked(batches).take();
        // The thread is detached while the other threads end, so the interpreter can run other threads.
        let _ = Python::try_attach(|py| py.detach(|| batches.take().map(end)));
        // The interpreter itself may be ending.
        if let Some(batches) = batches {
            end(batches);
        }
    }
}

/// A batch in one allocation.
#[pyclass(frozen, module = "onefold._onefold")]
pub(crate) struct Block {
    memory: Memory,
    position: Option<Position>,
}

#[pymethods]
impl Block {
    /// Creates a block with a copy of `bytes`. `spec` is the spec of another block.
    #[new]
    fn new(py: Python<'_>, bytes: pyo3::buffer::PyBuffer<u8>, spec: &str) -> PyResult<Self> {
        let memory = Memory::copy_of(&bytes.to_vec(py)?, spec).map_err(|error| of_library(py, &error))?;
        Ok(Self { memory, position: None })
    }

    /// Returns a buffer of the bytes: read-only, unless the caller requests a writable buffer. A writable buffer is
    /// refused once Arrow or another thread relies on the bytes.
    ///
    /// # Safety
    ///
    /// CPython calls it with a valid `view`, and releases the view before it drops the object that holds the memory.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let memory = &slf.get().memory;
        let length = ffi::Py_ssize_t::try_from(memory.len())
            .map_err(|error| PyBufferError::new_err(error.to_string()))?;
        let writable = flags & ffi::PyBUF_WRITABLE != 0;
        if writable && !memory.allow_writes() {
            return Err(PyBufferError::new_err("Arrow has the memory of this batch, which must not change"));
        }
        let (start, read_only) = (memory.address().cast(), c_int::from(!writable));
        // SAFETY: `view` is valid, and the bytes live as long as `slf`, to which the view holds a reference.
        let failed = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start, length, read_only, flags) };
        if failed == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }

    /// Returns where the parts of the batch are, as JSON.
    fn spec(&self) -> PyResult<String> {
        to_json(self.memory.places())
    }

    /// Returns the position after the batch as JSON.
    fn position(&self) -> PyResult<Option<String>> {
        self.position.as_ref().map(to_json).transpose()
    }

    #[getter]
    fn size(&self) -> usize {
        self.memory.places().size
    }

    /// Returns a block in which every sample has its own copy of its lists.
    fn expand(&self, py: Python<'_>) -> PyResult<Self> {
        let places = self.memory.places();
        let widths = (places.dense_width, places.label_width);
        let expanded =
            py.detach(|| Ok(PackedBatch::copy_of(&self.memory.fixed().unpack()?.expand(), widths, false)));
        let expanded = expanded.map_err(|error: Error| of_library(py, &error))?;
        Ok(Self { memory: Memory::new(expanded), position: self.position.clone() })
    }

    /// Returns the schema as an Arrow PyCapsule.
    fn __arrow_c_schema__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyCapsule>> {
        let rows = self.record_batch(py)?;
        Ok(to_schema_pycapsule(py, rows.schema().as_ref())?)
    }

    /// Returns a struct array as Arrow PyCapsules: a record batch, without a copy unless Python may write to the
    /// memory.
    #[pyo3(signature = (requested_schema=None))]
    fn __arrow_c_array__<'py>(
        &self,
        py: Python<'py>,
        requested_schema: Option<Bound<'py, PyCapsule>>,
    ) -> PyResult<Bound<'py, PyTuple>> {
        let rows = self.record_batch(py)?;
        let schema: Arc<Schema> = rows.schema();
        let field =
            Field::new_struct("", schema.fields().clone(), false).with_metadata(schema.metadata().clone());
        let array = StructArray::from(rows);
        debug_assert_eq!(array.len(), self.size());
        Ok(to_array_pycapsules(py, field.into(), &array, requested_schema)?)
    }
}

impl Block {
    fn record_batch(&self, py: Python<'_>) -> PyResult<arrow::array::RecordBatch> {
        let places = self.memory.places();
        let widths = (places.dense_width, places.label_width);
        let made = py.detach(|| self.memory.fixed().unpack()?.to_record_batch(widths));
        made.map_err(|error| of_library(py, &error))
    }
}
