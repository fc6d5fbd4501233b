//! How a dataset is written.

use serde::{Deserialize, Serialize};

use crate::{Buckets, Commit, Error, Layout, MOST_BUCKETS, Order, Result, Sessions};

/// How a dataset is written.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct WriterOptions {
    /// How sparse features are stored. It does not change what the [`DatasetWriter`](crate::DatasetWriter) is given.
    pub layout: Layout,
    /// The order in which the samples will arrive at [`DatasetWriter::write`](crate::DatasetWriter::write).
    pub order: Order,
    /// What becomes of an existing dataset.
    pub commit: Commit,
    /// Whether the samples have [`SAMPLE_KEY_COLUMN`](crate::SAMPLE_KEY_COLUMN), to be stored in a new dataset. A
    /// dataset that is appended to keeps having or lacking it.
    pub sample_keys: bool,
    /// The buckets of a new dataset, and their ranges. A dataset that is appended to keeps its own.
    pub buckets: Buckets,
    /// What makes a session, which the snapshot records; it must be that of a dataset that is appended to.
    pub sessions: Option<Sessions>,
    /// Threads of a [`DatasetWriter`](crate::DatasetWriter) that encode row groups, while the next one is gathered. What
    /// is written does not depend on their number.
    pub threads: usize,
    /// Columns that come first in the files, in this order: those that jobs read most, side by side, are read in fewer
    /// requests. The others follow in the schema's order, which readers see in any case.
    pub column_order: Vec<String>,
    /// A row group ends at the first session boundary after this many decoded bytes (4 GiB at most), and at the latest
    /// after twice as many. Decoded, every sample carries every list, in any layout.
    pub row_group_bytes: usize,
    /// A file ends at the first row group end after this many decoded bytes.
    pub file_bytes: usize,
    /// zstd level of the pages.
    pub zstd_level: i32,
}

impl WriterOptions {
    /// The options for samples in this order: a new dataset of one bucket in the layout `rows` without sample keys, one
    /// thread, columns in the schema's order, row groups of 64 MiB and files of 2 GiB decoded, zstd 3.
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
            zstd_level: 3,
        }
    }

    /// Checks that a dataset can have the buckets.
    ///
    /// # Errors
    ///
    /// [`Error::Fault`] if the number of buckets is zero, too large, or no multiple of the length of a range.
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
