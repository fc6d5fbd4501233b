//! Merges late samples into the partitions of a dataset that they belong to, each exactly once.
//!
//! ```text
//! late samples ─▶ find the sessions that they continue ─▶ drop existing samples ─▶ form sessions ─▶ encode ─┐
//!                                                   samples of the ranges of buckets that change ─▶ encode ─┴─▶ sort, decode, write
//! ```
//!
//! A merge has the same result as a build of all logs: the same samples in the same sessions and in the same order. It
//! reads the times of the dataset's sessions that late samples could continue. It reads complete samples only from the
//! ranges of buckets that change. Each step is a query, which runs in this process or on a cluster.
//!
//! **A sample exists already** if the dataset has a sample with the same user (or session key), the same values of the
//! partition columns, and the same key. Without keys, the sample must have the same time and the same digest (of its
//! time, floats and the lists of the log). If several late samples are equal, as many of them exist already as the
//! dataset has. Existing samples are not changed.
//!
//! **Sessions** are formed from late samples and the sessions of the dataset together. A late sample may therefore move
//! the start of a session, which changes the session's id and maybe its partition, and it may unite sessions.

mod old;
mod old_rows;
mod sql;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use datafusion::arrow::array::{AsArray, RecordBatch};
use datafusion::arrow::datatypes::{Int64Type, Schema as ArrowSchema};
use datafusion::datasource::empty::EmptyTable;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::prelude::SessionContext;
use onefold_base::progress::Reporter;
use onefold_datasets::{PartitionChoice, PartitionKey, Sessions, Snapshot, hash_id};
use onefold_sql::Query as _;
use serde::Serialize;

pub(crate) use self::old::OldDataset;
use self::old_rows::{FILES, OldFile, Read};
pub(crate) use self::old_rows::{OldRowsExec, OldRowsSpec};
use self::sql::{COUNT, RANGE, Sql};
use crate::cluster::{
    ClusterOptions, Clustering, Lacks, LateSamples, ListColumn, MergedQueries, PARTITION, Partitions,
    SentLists, WrittenLists, fold_old_samples, same_hash,
};
use crate::config::Config;
use crate::decide::{OutputPlan, list_columns};
use crate::error::{Error, Result};
use crate::planned::PlannedTable;
use crate::reading::Reading;
use crate::remote::{Cluster, WorkFile, WorkRowsSpec, WrittenRows, cluster_of};
use crate::sessionize::{self, NARROW_VIEW, SAMPLES_VIEW, START};
use crate::spool::{Spool, counts};

/// The result of a merge.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct MergeSummary {
    /// The number of samples that were added to the dataset.
    pub samples_added: u64,
    /// The number of samples of the logs that the dataset already had.
    pub samples_skipped: u64,
    /// The number of ranges of buckets that were rewritten, summed over partitions.
    pub ranges_rewritten: u64,
}

/// A merge of the samples of a configuration into a dataset.
pub(crate) struct Merge<'a> {
    config: &'a Config,
    partitions: Partitions,
    context: SessionContext,
    columns: Arc<ArrowSchema>,
    options: ClusterOptions,
    old: OldDataset,
    sql: Sql<'a>,
    spool: Spool,
    /// The files in the work folder of a cluster: lists of data files to read, and vocabularies of lists.
    sent: Vec<WrittenRows>,
    sent_lists: Option<SentLists>,
    /// The partition indices and ranges of buckets of the dataset in which sessions of late samples could be.
    near: BTreeSet<(usize, u32)>,
    /// The partitions and ranges of buckets that are rewritten.
    pub(crate) changed: BTreeSet<(PartitionKey, u32)>,
    /// The partitions and ranges of buckets to which sessions of the dataset move, with the indices of the partitions
    /// from which they move.
    moved: BTreeSet<((PartitionKey, u32), usize)>,
    pub(crate) summary: MergeSummary,
}

/// Checks that samples of `config` can be merged into the dataset of a snapshot.
///
/// # Errors
///
/// [`Error::Fault`] if late samples cannot be distinguished from existing ones.
pub(crate) fn check(config: &Config, snapshot: &Snapshot) -> Result<()> {
    let wrong = |message: String, hint: &str| Err(Error::config(&config.path, message, hint));
    if config.samples.by_rows {
        let message =
            "samples without times cannot be merged: the number of a row is another one in other logs";
        return wrong(message.to_owned(), "append or replace whole partitions, or give the samples times");
    }
    let keyed = !config.samples.key.is_empty();
    if keyed && !snapshot.sample_keys {
        let message =
            "`[samples].key` identifies samples, but the dataset was built without it and has no keys";
        return wrong(
            message.to_owned(),
            "build the dataset anew; from then on late samples can be merged into it",
        );
    }
    let cut = config.vocabularies.iter().find(|(_, vocabulary)| vocabulary.min_count > 1);
    if let Some((name, _)) = cut.filter(|_| !keyed) {
        let message = format!(
            "the vocabulary `{name}` has a `min_count`, so the dataset does not have all ids of its samples, and late samples \
             cannot be compared with them"
        );
        return wrong(message, "give samples a key, `[samples].key`, and build the dataset anew");
    }
    Ok(())
}

impl<'a> Merge<'a> {
    /// Prepares a merge of the samples of `reading` into the dataset at `root` with this snapshot.
    pub(crate) fn new(
        config: &'a Config,
        reading: &Reading<'_>,
        (root, snapshot): (&Path, Snapshot),
    ) -> Result<Self> {
        let columns = Arc::new(reading.planned.wide.schema().as_arrow().clone());
        let options = reading.cluster_options();
        let old = OldDataset::new(config, root, snapshot, &columns);
        let instants = sessionize::instants(config, &columns)?;
        Ok(Self {
            config,
            partitions: Partitions::of(config),
            context: reading.context.clone(),
            columns,
            sql: Sql { config, order: options.order, instants },
            options,
            old,
            spool: Spool::default(),
            sent: Vec::new(),
            sent_lists: None,
            near: BTreeSet::new(),
            changed: BTreeSet::new(),
            moved: BTreeSet::new(),
            summary: MergeSummary::default(),
        })
    }

    /// Finds the sessions of the dataset that late samples could continue, drops late samples with existing keys, and
    /// encodes the others.
    ///
    /// # Errors
    ///
    /// The errors of the engine; [`Error::Dataset`] if the dataset cannot be read; [`Error::Fault`] if the logs have no
    /// samples.
    pub(crate) async fn encode(
        &mut self,
        reading: &Reading<'_>,
        reporter: &dyn Reporter,
    ) -> Result<LateSamples> {
        self.find_near().await?;
        self.check_comparable()?;
        let near = self.near.clone();
        self.read_old(sql::OLD_TIMES, &near, Read::Times, &[]).await?;
        self.keep(sql::OLD_SESSIONS, &self.sql.old_sessions()).await?;
        self.keep(sql::FOUND, &self.sql.found()).await?;
        if !self.config.samples.key.is_empty() {
            self.leave_out_known_keys().await?;
        }
        let (context, config, copies) = (&self.context, self.config, self.sql.copies(LateSamples::RECORDS));
        let table = (&mut self.spool, sql::LATE_RECORDS, copies.as_str());
        let late =
            LateSamples::encode(config, context, &self.columns, &self.options, table, reporter).await?;
        let (found, known) = (late.totals.samples, self.summary.samples_skipped);
        reading.check_count(found, Some(known))?;
        if found + known == 0 { Err(reading.no_samples()) } else { Ok(late) }
    }

    /// Finds the late samples that exist already, and the ranges of buckets that change in the partitions of `choice`.
    ///
    /// # Errors
    ///
    /// The errors of the engine; [`Error::Dataset`] if the dataset cannot be read; [`Error::Fault`] if a session would
    /// move between a partition of `choice` and another one.
    pub(crate) async fn place(&mut self, choice: &PartitionChoice<'_>, decided: &OutputPlan) -> Result<()> {
        if self.config.samples.key.is_empty() {
            self.find_known_digests(choice, decided).await?;
        }
        self.keep(sql::MERGED, &self.sql.merged()).await?;
        self.keep(sql::GROWN, &self.sql.grown()).await?;
        self.keep(sql::MOVED, &self.sql.moved()).await?;
        for batch in self.rows(&self.sql.grown_ranges()).await? {
            for row in 0..batch.num_rows() {
                let key = self.partitions.key(&batch, row)?;
                if choice.matches(&key)? {
                    self.summary.samples_added += integer(&batch, COUNT, row).unsigned_abs();
                    self.changed.insert((key, integer(&batch, RANGE, row) as u32));
                }
            }
        }
        for batch in self.rows(&self.sql.moves()).await? {
            for row in 0..batch.num_rows() {
                self.add_move(choice, &batch, row)?;
            }
        }
        self.summary.ranges_rewritten = self.changed.len() as u64;
        Ok(())
    }

    /// Returns the features that the files of rewritten ranges lack: those that the files lack from which samples are
    /// taken. If the new files had the missing values, no command would compute the values later.
    pub(crate) fn lacks(&self) -> Lacks {
        let own = self.changed.iter().filter_map(|place| Some((place, self.old.range(&place.0, place.1)?.0)));
        let moved = self.moved.iter().map(|(place, from)| (place, *from));
        let mut lacks: BTreeMap<&(PartitionKey, u32), BTreeSet<&String>> = BTreeMap::new();
        for (place, number) in own.chain(moved) {
            let features = self.old.of_range(number, place.1).flat_map(|set| &set.changes.lacks);
            lacks.entry(place).or_default().extend(features);
        }
        let lacking = lacks.into_iter().filter(|(_, features)| !features.is_empty());
        lacking.map(|(place, features)| (place.clone(), features.into_iter().cloned().collect())).collect()
    }

    /// Plans the clustering of the late samples together with the samples of the ranges that change.
    pub(crate) async fn cluster(
        &mut self,
        late: LateSamples,
        decided: &OutputPlan,
    ) -> Result<Clustering<'a>> {
        let queries = self.queries(decided).await?;
        let (context, columns) = (&self.context, &self.columns);
        Clustering::merged(self.config, context, columns, &self.options, late, &queries).await
    }

    /// Makes the queries of the samples that are written.
    async fn queries(&mut self, decided: &OutputPlan) -> Result<MergedQueries> {
        let of_dataset = |(key, range): &(PartitionKey, u32)| self.old.range(key, *range);
        let ranges: BTreeSet<(usize, u32)> = self.changed.iter().filter_map(of_dataset).collect();
        if !ranges.is_empty() {
            self.encode_old(&ranges, decided).await?;
        }
        Ok(MergedQueries {
            sessions: self.sql.sessions(),
            records: self.sql.records(!ranges.is_empty()),
            first: self.sql.first(),
        })
    }

    /// Finds the ranges of the dataset in which sessions of late samples could be: the ranges of their identities in
    /// partitions with the same values of the partition columns. If a pause ends a session, only sessions close in time
    /// count.
    async fn find_near(&mut self) -> Result<()> {
        let mut places = Vec::new();
        for batch in self.rows(&self.sql.places()).await? {
            for row in 0..batch.num_rows() {
                let times = (integer(&batch, START, row), integer(&batch, sql::LAST, row));
                let range = integer(&batch, RANGE, row) as u32;
                places.push((self.partitions.key(&batch, row)?, range, times));
            }
        }
        for (key, range, times) in places {
            for number in 0..self.old.snapshot.partitions.len() {
                if !self.near.contains(&(number, range)) && self.is_near(&key, range, times, number) {
                    self.near.insert((number, range));
                }
            }
        }
        Ok(())
    }

    /// Checks that existing samples can be recognized. Samples without keys are compared by all features, so the files
    /// of the dataset must not lack features that were added later.
    fn check_comparable(&self) -> Result<()> {
        let sets = self.near.iter().flat_map(|(number, _)| &self.old.snapshot.partitions[*number].files);
        let lacking = sets.flat_map(|set| &set.changes.lacks).next();
        let Some(feature) = lacking.filter(|_| self.config.samples.key.is_empty()) else { return Ok(()) };
        let message = format!(
            "samples of the dataset lack the feature `{feature}`, which was added later, so late samples without a key \
             cannot be compared with them"
        );
        let hint = "append all samples of these partitions, without a merge, which gives them the feature";
        Err(Error::config(&self.config.path, message, hint))
    }

    /// Returns whether late samples of one identity could belong to a session in partition `number` of the dataset. The
    /// samples have times from `low` to `high`, and the first one alone would be in the partition `key`.
    fn is_near(&self, key: &PartitionKey, range: u32, (low, high): (i64, i64), number: usize) -> bool {
        let partition = &self.old.snapshot.partitions[number];
        let columns = self.config.partition_columns.len();
        if partition.key.columns()[..columns] != key.columns()[..columns] {
            return false;
        }
        let Sessions::Gap { gap_micros, .. } = self.config.session else { return true };
        let (low, high) = (low.saturating_sub(gap_micros), high.saturating_add(gap_micros));
        let at = |time: i64| self.partitions.at(key, time);
        if at(high).is_some_and(|last| partition.key > last) {
            return false;
        }
        // A session of an earlier partition may have continued until `low`.
        let is_earlier = at(low).is_some_and(|first| partition.key < first);
        let last = self.old.last_time(number, range);
        !is_earlier || last.is_none_or(|last| last >= low)
    }

    /// Replaces the views of late samples by views without the samples whose keys the dataset has.
    async fn leave_out_known_keys(&mut self) -> Result<()> {
        let found = self.found_ranges().await?;
        self.read_old(sql::OLD_KEYS, &found, Read::Keys, &[]).await?;
        self.keep(sql::KNOWN_KEYS, &self.sql.known_keys()).await?;
        let all = self.count(NARROW_VIEW).await?;
        for view in [SAMPLES_VIEW, NARROW_VIEW] {
            let samples = self.context.table(view).await?.into_view();
            self.context.deregister_table(view)?;
            let name = format!("{view}_all");
            self.context.register_table(name.as_str(), samples)?;
            let late = self.context.query(&self.sql.without_known_keys(&name)).await?.into_view();
            self.context.register_table(view, late)?;
        }
        self.summary.samples_skipped = all - self.count(NARROW_VIEW).await?;
        Ok(())
    }

    async fn count(&self, table: &str) -> Result<u64> {
        let sql = format!("SELECT count(*) FROM {table}");
        Ok(counts(&self.context, &sql).await?.first().copied().unwrap_or(0))
    }

    /// Makes a table of the digests of the dataset's samples in the sessions of late samples, for partitions that may
    /// change.
    async fn find_known_digests(&mut self, choice: &PartitionChoice<'_>, decided: &OutputPlan) -> Result<()> {
        let mut found = BTreeSet::new();
        for (number, range) in self.found_ranges().await? {
            if choice.matches(&self.old.snapshot.partitions[number].key)? {
                found.insert((number, range));
            }
        }
        self.encode_old(&found, decided).await?;
        self.keep(sql::OLD_DIGESTS, &self.sql.old_digests()).await?;
        self.keep(sql::KNOWN_DIGESTS, &self.sql.known_digests()).await?;
        let known = counts(&self.context, &self.sql.known_samples()).await?;
        self.summary.samples_skipped = known.first().copied().unwrap_or(0);
        Ok(())
    }

    /// Returns the partition indices and ranges of buckets of the sessions that were found.
    async fn found_ranges(&self) -> Result<BTreeSet<(usize, u32)>> {
        let mut found = BTreeSet::new();
        for batch in self.rows(&self.sql.found_ranges()).await? {
            let of = |row| (integer(&batch, PARTITION, row) as usize, integer(&batch, RANGE, row) as u32);
            found.extend((0..batch.num_rows()).map(of));
        }
        Ok(found)
    }

    /// Plans the encoding of the samples of some ranges of the dataset.
    async fn encode_old(&mut self, ranges: &BTreeSet<(usize, u32)>, decided: &OutputPlan) -> Result<()> {
        self.read_old(sql::OLD_SAMPLES, ranges, Read::Samples, &decided.lists).await?;
        let (context, options) = (&self.context, &self.options);
        fold_old_samples(self.config, context, options, sql::OLD_SAMPLES, sql::OLD_RECORDS).await
    }

    /// Records the move of a session of the dataset to another partition, if it moves.
    fn add_move(&mut self, choice: &PartitionChoice<'_>, batch: &RecordBatch, row: usize) -> Result<()> {
        let to = self.partitions.key(batch, row)?;
        let (number, range) = (integer(batch, PARTITION, row) as usize, integer(batch, RANGE, row) as u32);
        let from = &self.old.snapshot.partitions[number].key;
        if to == *from {
            return Ok(());
        }
        match (choice.matches(from)?, choice.matches(&to)?) {
            (false, false) => {}
            (true, true) => {
                self.changed.insert((from.clone(), range));
                self.moved.insert(((to, range), number));
            }
            _ => {
                return Err(Error::data(
                    format!("partition `{from}`"),
                    format!(
                        "with the late samples, sessions that it has are parts of sessions that start in `{to}`, but only \
                         one of the two partitions may change"
                    ),
                    "merge into both partitions",
                ));
            }
        }
        Ok(())
    }

    /// Registers the samples of some ranges as a table. `lists` are the list columns to read.
    async fn read_old(
        &mut self,
        table: &str,
        ranges: &BTreeSet<(usize, u32)>,
        read: Read,
        lists: &[ListColumn],
    ) -> Result<()> {
        let (spec, schema) = self.old.rows(self.config, read);
        self.context.deregister_table(table)?;
        let readers = self.context.copied_config().target_partitions();
        let files = self.old.files(self.config, ranges, readers)?;
        if files.is_empty() {
            self.context.register_table(table, Arc::new(EmptyTable::new(schema)))?;
            return Ok(());
        }
        let files = files.iter().map(|files| OldFile::rows(files)).collect::<Result<Vec<_>, _>>()?;
        let (files, lists): (Arc<dyn ExecutionPlan>, _) = match cluster_of(&self.context.copied_config()) {
            None => (OldFile::scan(files)?, WrittenLists::Here(lists.to_vec())),
            Some(cluster) => {
                let lists = WrittenLists::InFiles(self.sent_lists(&cluster, lists)?, Arc::default());
                (self.sent_files(&cluster, &files).await?, lists)
            }
        };
        let rows = OldRowsExec::new(Arc::new(spec), lists, &schema, files);
        self.context.register_table(table, Arc::new(PlannedTable(Arc::new(rows))))?;
        Ok(())
    }

    /// Writes the vocabularies of lists to the work folder, once per merge.
    fn sent_lists(&mut self, cluster: &Arc<dyn Cluster>, lists: &[ListColumn]) -> Result<SentLists> {
        if lists.is_empty() {
            return Ok(SentLists::default());
        }
        if let Some(sent) = &self.sent_lists {
            return Ok(sent.clone());
        }
        let (sent, files) = SentLists::write(cluster.work_folder(), lists)?;
        self.sent.push(files);
        Ok(self.sent_lists.insert(sent).clone())
    }

    /// Writes rows that name data files to the work folder, one file per reader, and returns a scan of these rows.
    async fn sent_files(
        &mut self,
        cluster: &Arc<dyn Cluster>,
        files: &[RecordBatch],
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let folder = cluster.work_folder();
        let spec = WorkRowsSpec { folder: folder.to_owned(), name: "files".to_owned() };
        let mut written = WrittenRows::none_in(folder)?;
        for rows in files {
            let mut file = WorkFile::create(&spec, Arc::clone(&FILES))?;
            file.write(rows)?;
            written.add(file.finish()?.0);
        }
        let scan = written.scan(&self.context, &FILES).await?;
        self.sent.push(written);
        Ok(scan)
    }

    /// Runs a query and stores its rows as a table.
    async fn keep(&mut self, table: &str, sql: &str) -> Result<()> {
        self.spool.table(&self.context, table, sql).await
    }

    /// Runs a query with a small result, and returns its rows.
    async fn rows(&self, sql: &str) -> Result<Vec<RecordBatch>> {
        tracing::debug!("{sql}");
        Ok(self.context.query(sql).await?.collect().await?)
    }
}

/// Returns a value of an integer column.
fn integer(batch: &RecordBatch, name: &str, row: usize) -> i64 {
    batch.column_by_name(name).map_or(0, |column| column.as_primitive::<Int64Type>().value(row))
}

/// Adds all ids of the vocabularies to the id maps of the lists in `decided`, including ids that no late sample has.
///
/// # Errors
///
/// [`Error::Dataset`] if the texts do not fit into memory; [`Error::Fault`] if two texts have the same hash on a
/// cluster.
pub(crate) fn know_originals(config: &Config, reading: &Reading<'_>, decided: &mut OutputPlan) -> Result<()> {
    let is_on_cluster = cluster_of(&reading.context.copied_config()).is_some();
    let mut maps = BTreeMap::new();
    for (name, vocabulary) in &decided.vocabularies {
        let texts = reading.ids.texts(name);
        for text in (1..=vocabulary.len() as i64).filter_map(|id| vocabulary.original_text(id)) {
            let Some(texts) = texts else { break };
            // Other machines identify texts by their hashes.
            if texts.number(text)? != hash_id(text.as_bytes()) && is_on_cluster {
                return Err(same_hash(name, text));
            }
        }
        maps.insert(name.clone(), vocabulary.id_map(texts));
    }
    decided.lists = list_columns(config, &maps);
    Ok(())
}
