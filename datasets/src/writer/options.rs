//! The options of a writer.

use serde::{Deserialize, Serialize};

use crate::{Buckets, Commit, Error, Layout, MOST_BUCKETS, Order, Result, Sessions};

/// Options for writing a dataset.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct WriterOptions {
    /// The layout of sparse features in files. The input of the [`DatasetWriter`](crate::DatasetWriter) does
    /// not depend on it.
    pub layout: Layout,
    /// The order in which samples arrive at [`DatasetWriter::write`](crate::DatasetWriter::write).
    pub order: Order,
    /// The effect on an existing dataset.
    pub commit: Commit,
    /// Whether the samples have [`SAMPLE_KEY_COLUMN`](crate::SAMPLE_KEY_COLUMN), which a new dataset then
    /// stores. An existing dataset determines this itself.
    pub sample_keys: bool,
    /// The buckets and ranges of a new dataset. An existing dataset keeps its own.
    pub buckets: Buckets,
    /// The definition of a session, which the snapshot records. It must equal the definition in an existing
    /// dataset.
    pub sessions: Option<Sessions>,
    /// The number of threads with which a [`DatasetWriter`](crate::DatasetWriter) encodes row groups while it
    /// gathers the next one. The output does not depend on it.
    pub threads: usize,
    /// The columns that come first in the files, in this order. If the columns that jobs read most are
    /// adjacent, reading them takes fewer requests. The other columns follow in schema order. Readers always
    /// see the schema order.
    pub column_order: Vec<String>,
    /// The decoded size in bytes (at most 4 GiB) after which a row group ends at the next session boundary.
    /// It ends after twice this size in any case. The decoded size counts each list for each sample, in any
    /// layout.
    pub row_group_bytes: usize,
    /// The decoded size in bytes after which a file ends with the current row group.
    pub file_bytes: usize,
}

impl WriterOptions {
    /// Creates options for a new dataset with samples in this order: one bucket, layout `rows`, no sample
    /// keys, one thread, columns in schema order, row groups of 64 MiB and files of 2 GiB decoded size.
    pub fn new(order: Order) -> Self {
        Self {
            layout: Layout::Rows,
            order,
            commit: Commit::Create,
            sample_keys: false,
            buckets: Buckets::with_own_files(1),
            sessions: None,
            threads: 1,
            column_order: Vec::new(),
            row_group_bytes: 64 << 20,
            file_bytes: 2 << 30,
        }
    }

    /// Checks that a dataset can have the buckets.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the number of buckets is zero, too large, or not a multiple of the length of a
    /// range.
    pub(super) fn check_buckets(&self) -> Result<()> {
        if self.buckets.is_valid() {
            return Ok(());
        }
        let Buckets { number, in_range } = self.buckets;
        let message = format!("a dataset cannot have {number} buckets in ranges of {in_range}");
        let hint =
            format!("choose 1 to {MOST_BUCKETS} buckets, and a length of ranges that divides their number");
        Err(Error::schema(message, hint))
    }
}
