//! Encoding, sorting and decoding returns the samples in order, for any order of the log and any memory limit.

use std::collections::BTreeMap;
use std::sync::Arc;

use datafusion::arrow::array::{
    Array, ArrayRef, AsArray, BinaryArray, Float32Array, Int64Array, ListArray, RecordBatch, StringArray,
    UInt64Array,
};
use datafusion::arrow::compute::{filter_record_batch, not};
use datafusion::arrow::datatypes::{Float32Type, Int64Type, UInt64Type};
use datafusion::datasource::memory::MemorySourceConfig;
use datafusion::physical_plan::collect;
use onefold_datasets::{
    Buckets, CountBudget, Decode, KeptColumn, KeptKind, Order, PartitionColumn, PartitionKey, PartitionType,
    WriterOptions, overlap,
};
use proptest::prelude::*;

use super::bucket_files::WriteSpec;
use super::convert::{ColumnNames, Converter};
use super::counts::IdCounts;
use super::decode::{DeltaDecoder, ListColumn, SessionRun};
use super::encode::{ChainNumbers, DeltaEncoder, EncoderOptions, SampleTotals};
use super::fold::{DIGEST, FoldExec, FoldSpec, RECORD};
use super::partitions::Partitions;
use super::statistics::StatisticsOptions;
use super::timelines::Slice;
use super::totals::TotalsReader;
use super::unfold::{CutSpec, RowGroups, SortedRecords, Unfolding};
use crate::ids::IdForm;
use crate::sessionize::{SESSION, TIME, TOTALS};

/// A sample: session, time, a number, a bag of ids and a sequence of ids.
type Sample = (i64, i64, f32, Vec<i64>, Vec<i64>);

/// Computes the kept values of a sample: an integer and a text, which may be null.
fn kept(sample: &Sample) -> (Option<i64>, Option<String>) {
    let text = (!sample.3.is_empty()).then(|| "é".repeat(sample.3.len()));
    ((sample.1 % 2 == 0).then_some(sample.1 - 9), text)
}

fn batch(samples: &[Sample]) -> RecordBatch {
    let lists = |lists: Vec<Vec<i64>>| -> ArrayRef {
        let lists = lists.into_iter().map(|list| Some(list.into_iter().map(Some).collect::<Vec<_>>()));
        Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>(lists))
    };
    let numbers = |of: fn(&Sample) -> i64| -> ArrayRef {
        Arc::new(Int64Array::from_iter_values(samples.iter().map(of)))
    };
    RecordBatch::try_from_iter([
        ("session", numbers(|sample| sample.0)),
        (TIME, numbers(|sample| sample.1)),
        ("x", Arc::new(Float32Array::from_iter_values(samples.iter().map(|sample| sample.2)))),
        ("bag", lists(samples.iter().map(|sample| sample.3.clone()).collect())),
        ("past", lists(samples.iter().map(|sample| sample.4.clone()).collect())),
        ("request", Arc::new(Int64Array::from_iter(samples.iter().map(|sample| kept(sample).0)))),
        ("page", Arc::new(StringArray::from_iter(samples.iter().map(|sample| kept(sample).1)))),
        // The timeline of every user starts at 0. The window of a sample contains the last two items before its
        // time.
        ("start", numbers(|sample| (sample.1 - 2).max(0))),
        ("end", numbers(|sample| sample.1)),
    ])
    .unwrap()
}

fn names() -> ColumnNames {
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    ColumnNames {
        problems: crate::problems::Problems::default(),
        time: TIME.to_owned(),
        time_limits: None,
        keys: names(&["session"]),
        identity: names(&["session"]),
        partition: Vec::new(),
        order: Vec::new(),
        floats: names(&["x"]),
        weight: None,
        lists: ["bag", "past"].map(|name| (name.to_owned(), IdForm::Integers)).to_vec(),
        positions: names(&["start", "end"]),
        kept: kept_columns(),
    }
}

fn kept_columns() -> Vec<KeptColumn> {
    let column = |name: &str, kind| KeptColumn { name: name.to_owned(), kind };
    vec![column("request", KeptKind::Integer), column("page", KeptKind::Text)]
}

fn options(chained: bool, state_bytes: usize) -> EncoderOptions {
    EncoderOptions {
        floats: vec!["x".into()],
        lists: vec![("bag".into(), false), ("past".into(), true)],
        kept: kept_columns(),
        digested: 2,
        first_worker: 0,
        timelines: vec![1],
        keyed: false,
        gap_micros: None,
        chained,
        state_bytes,
    }
}

/// Options of samples that have only positions in a timeline.
fn without_columns() -> EncoderOptions {
    let (floats, lists, kept) = (Vec::new(), Vec::new(), Vec::new());
    EncoderOptions { floats, lists, kept, digested: 0, ..options(true, 1 << 20) }
}

fn wanted() -> StatisticsOptions {
    StatisticsOptions {
        vocabularies: vec!["ids".into()],
        vocabulary_of: vec![Some(0), Some(0)],
        timelines: vec![1],
        changes: true,
        values: true,
    }
}

/// A record with its sort key.
type Sorted = (i64, i64, [u64; 2], Vec<u8>);

fn encode(
    samples: &[Sample],
    batch_rows: usize,
    options: &EncoderOptions,
    workers: usize,
) -> (Vec<Sorted>, SampleTotals) {
    let mut sorted = Vec::new();
    let mut all: Option<SampleTotals> = None;
    for worker in 0..workers {
        let records_schema = super::fold::records_schema(&names(), &schema()).unwrap();
        let mut encoder = DeltaEncoder::new(
            options.clone(),
            (&wanted(), &CountBudget::new(1 << 30)),
            &records_schema,
            ChainNumbers::of_worker(worker),
        )
        .unwrap();
        for samples in samples.chunks(batch_rows) {
            let batch = batch(samples);
            let converted = Converter::new(names(), &batch.schema()).unwrap().convert(&batch).unwrap();
            encoder.encode(&converted, &converted.rows_by_worker(workers)[worker]).unwrap();
        }
        while encoder.forget_some().unwrap() {}
        encoder.records().complete_batch().unwrap();
        sorted.extend(encoder.records().take().iter().flat_map(read_records));
        let (totals, _) = encoder.finish();
        match &mut all {
            None => all = Some(totals),
            Some(all) => all.merge(totals).unwrap(),
        }
    }
    sorted.sort();
    (sorted, all.unwrap())
}

fn read_records(records: &RecordBatch) -> Vec<Sorted> {
    let half = |i: usize, row: usize| records.column(i).as_primitive::<UInt64Type>().value(row);
    let number = |i: usize, row: usize| records.column(i).as_primitive::<Int64Type>().value(row);
    let record = |row: usize| {
        let bytes = records.column(4).as_binary::<i32>().value(row).to_vec();
        (number(0, row), number(1, row), [half(2, row), half(3, row)], bytes)
    };
    (0..records.num_rows()).map(record).collect()
}

fn schema() -> datafusion::arrow::datatypes::SchemaRef {
    batch(&[]).schema()
}

/// Decodes records to samples, and to the lists from a timeline of even numbers.
fn decode(sorted: &[Sorted], options: &EncoderOptions, totals: &SampleTotals) -> Vec<(Sample, Vec<i64>)> {
    let list = |name: &str| ListColumn { name: name.into(), vocabulary: None };
    let mut decoder = DeltaDecoder::new(options, vec![list("bag"), list("past"), list("seen")], false);
    let mut samples = Vec::new();
    let mut give = |batch: RecordBatch| {
        for row in 0..batch.num_rows() {
            let number = |i: usize| batch.column(i).as_primitive::<Int64Type>().value(row);
            let time =
                batch.column(1).as_primitive::<datafusion::arrow::datatypes::TimestampMicrosecondType>();
            let lists = |i: usize| {
                batch.column(i).as_list_view::<i32>().value(row).as_primitive::<Int64Type>().values().to_vec()
            };
            let x = batch.column(2).as_primitive::<Float32Type>().value(row);
            let sample = (number(0), time.value(row), x, lists(5), lists(6));
            let request = batch.column(3).as_primitive::<Int64Type>();
            let page = batch.column(4).as_string::<i32>();
            let found = (
                request.is_valid(row).then(|| request.value(row)),
                page.is_valid(row).then(|| page.value(row).to_owned()),
            );
            assert_eq!(found, kept(&sample));
            samples.push((sample, lists(7)));
        }
    };
    for run in sorted.chunk_by(|a, b| a.0 == b.0) {
        let first = run[0].1.saturating_sub(2).max(0);
        let positions: Vec<i64> = (first..run[run.len() - 1].1).collect();
        let items = positions.iter().map(|item| 2 * item).collect();
        // A session may arrive in several runs.
        for part in run.chunks(3) {
            let run = SessionRun {
                session: part[0].0,
                times: &part.iter().map(|record| record.1).collect::<Vec<_>>(),
                keys: None,
                origins: None,
                records: &BinaryArray::from_iter_values(part.iter().map(|record| &record.3)),
                slices: &[Arc::new(Slice {
                    number: run[0].0,
                    positions: positions.clone(),
                    columns: vec![Vec::clone(&items)],
                })],
            };
            decoder.push(&run, &mut give).unwrap();
        }
    }
    decoder.flush(&mut give).unwrap();
    let decoded = decoder.take_totals();
    assert_eq!((decoded.samples, decoded.digest), (totals.samples, totals.digest));
    samples
}

fn samples() -> impl Strategy<Value = Vec<Sample>> {
    let list = || prop::collection::vec(0..4_i64, 0..4);
    let sample = (0..5_i64, 0..30_i64, 0..2_u8, prop::option::of(list()), prop::option::of(list()));
    prop::collection::vec(sample, 1..80).prop_map(|samples| {
        // Lists repeat, or slide, from the previous sample of the session in the log.
        let mut last: [(Vec<i64>, Vec<i64>); 5] = Default::default();
        let with_lists = |(session, time, x, bag, appended): (i64, i64, u8, _, Option<Vec<i64>>)| {
            let (last_bag, past) = &mut last[session as usize];
            *last_bag = Option::unwrap_or_else(bag, || last_bag.clone());
            past.extend(appended.unwrap_or_default());
            *past = past[past.len().saturating_sub(6)..].to_vec();
            (session, time, f32::from(x), last_bag.clone(), past.clone())
        };
        samples.into_iter().map(with_lists).collect()
    })
}

/// Cuts samples into row groups of `samples` samples at any position, and keeps their decode functions.
struct Cutting {
    samples: usize,
    pushed: usize,
    row_groups: Vec<Decode>,
}

impl RowGroups for Cutting {
    fn wants(&mut self, _: &PartitionKey) -> crate::error::Result<bool> {
        Ok(true)
    }

    fn leave_out(&mut self, _: &PartitionKey, _: &[i64]) -> crate::error::Result<()> {
        unreachable!("all partitions are wanted")
    }

    fn enter(&mut self, _: &PartitionKey, _: u32) -> crate::error::Result<()> {
        Ok(())
    }

    fn push(&mut self, _: i64, _: i64, _: usize) -> crate::error::Result<bool> {
        self.pushed += 1;
        Ok(self.pushed > 1 && self.pushed % self.samples == 1 % self.samples)
    }

    fn write_row_group(&mut self, decode: Decode) -> crate::error::Result<()> {
        self.row_groups.push(decode);
        Ok(())
    }
}

/// Returns the lists of samples whose sorted records arrive in batches of `batch_rows` and are decoded in row
/// groups of `samples` samples, last row group first.
fn unfold(
    sorted: &[Sorted],
    options: &EncoderOptions,
    (batch_rows, samples): (usize, usize),
    totals: &SampleTotals,
) -> Vec<(i64, Vec<i64>, Vec<i64>)> {
    let text = "format_version = 1\n[sources]\nlog = \"x\"\n[samples]\nquery = \"\"\n[session]\nkey = [\"session\"]\n\
                time = \"time\"\n[features]\nitem = { kind = \"label\" }\nx = { kind = \"dense\" }\n";
    let config = crate::config::Config::parse(std::path::Path::new("dataset.toml"), text).unwrap();
    let list = |name: &str| ListColumn { name: name.into(), vocabulary: None };
    let lists = vec![list("bag"), list("past"), list("seen")];
    let spec = CutSpec {
        partitions: Partitions::of(&config),
        encoded: options.clone(),
        digested: true,
        buckets: Buckets::with_own_files(1),
        timelines: Vec::new(),
        place_of_slices: Vec::new(),
        numbered_by: Vec::new(),
    };
    let mut unfolding = Unfolding::new(spec, lists);
    let mut output = Cutting { samples, pushed: 0, row_groups: Vec::new() };
    let numbers = |of: fn(&Sorted) -> i64, rows: &[Sorted]| -> ArrayRef {
        Arc::new(Int64Array::from_iter_values(rows.iter().map(of)))
    };
    unfolding.enter(&PartitionKey::default(), 0, &mut output).unwrap();
    let last = sorted.iter().map(|record| record.1).max().unwrap_or(0);
    let positions: Vec<i64> = (0..last).collect();
    let columns = vec![positions.iter().map(|item| 2 * item).collect()];
    let slice = Arc::new(Slice { number: 1, positions, columns });
    for rows in sorted.chunks(batch_rows) {
        let half = |half: usize| -> ArrayRef {
            Arc::new(UInt64Array::from_iter_values(rows.iter().map(|record| record.2[half])))
        };
        let records: ArrayRef = Arc::new(BinaryArray::from_iter_values(rows.iter().map(|record| &record.3)));
        let batch = RecordBatch::try_from_iter([
            (SESSION, numbers(|record| record.0, rows)),
            (TIME, numbers(|record| record.1, rows)),
            (DIGEST[0], half(0)),
            (DIGEST[1], half(1)),
            (RECORD, records),
        ]);
        let records = Arc::new(SortedRecords::of(&batch.unwrap()).unwrap());
        unfolding.push(&records, 0..rows.len(), &[Arc::clone(&slice)], &mut output).unwrap();
    }
    unfolding.leave(&mut output).unwrap();
    let threads: Vec<_> = output
        .row_groups
        .into_iter()
        .rev()
        .map(|decode| std::thread::spawn(move || decode().unwrap()))
        .collect();
    let batches: Vec<_> = threads.into_iter().rev().flat_map(|thread| thread.join().unwrap()).collect();
    let decoded = unfolding.totals();
    assert_eq!((decoded.samples, decoded.digest), (totals.samples, totals.digest));
    let lists = |batch: &RecordBatch, column: usize, row: usize| {
        let lists = batch.column(column).as_list_view::<i32>();
        lists.value(row).as_primitive::<Int64Type>().values().to_vec()
    };
    let rows = batches.iter().flat_map(|batch| (0..batch.num_rows()).map(move |row| (batch, row)));
    let session = |batch: &RecordBatch, row: usize| batch.column(0).as_primitive::<Int64Type>().value(row);
    rows.map(|(batch, row)| (session(batch, row), lists(batch, 6, row), lists(batch, 7, row))).collect()
}

proptest! {
    #[test]
    fn row_groups_are_decoded_in_any_order(
        samples in samples(),
        sizes in (1..20_usize, 1..9_usize),
        chained in any::<bool>(),
    ) {
        let options = options(chained, 1 << 20);
        let (sorted, totals) = encode(&samples, 7, &options, 2);
        let whole = decode(&sorted, &options, &totals).into_iter();
        let whole: Vec<_> = whole.map(|(sample, seen)| (sample.0, sample.4, seen)).collect();
        prop_assert_eq!(unfold(&sorted, &options, sizes, &totals), whole);
    }

    #[test]
    fn decoding_undoes_encoding(
        samples in samples(),
        batch_rows in 1..20_usize,
        workers in 1..4_usize,
        chained in any::<bool>(),
        state_bytes in prop_oneof![Just(0_usize), Just(1500), Just(1 << 20)],
    ) {
        let options = options(chained, state_bytes);
        let (sorted, totals) = encode(&samples, batch_rows, &options, workers);
        let decoded = decode(&sorted, &options, &totals);
        let mut expected: Vec<_> = samples.clone();
        let comparable = |sample: &Sample| format!("{:03} {:03} {sample:?}", sample.0, sample.1);
        expected.sort_by_key(comparable);
        let seen = |sample: &Sample| ((sample.1 - 2).max(0)..sample.1).map(|item| 2 * item).collect::<Vec<_>>();
        for (sample, timeline) in &decoded {
            prop_assert_eq!(timeline, &seen(sample));
        }
        prop_assert!(decoded.is_sorted_by_key(|(sample, _)| (sample.0, sample.1)));
        let mut decoded: Vec<_> = decoded.into_iter().map(|(sample, _)| sample).collect();
        decoded.sort_by_key(comparable);
        prop_assert_eq!(&decoded, &expected);

        // The count of an id is the number of its occurrences in the lists of samples.
        let mut naive = std::collections::BTreeMap::new();
        for id in samples.iter().flat_map(|sample| sample.3.iter().chain(&sample.4)) {
            *naive.entry(*id).or_insert(0_u64) += 1;
        }
        let counts: std::collections::BTreeMap<_, _> = totals.statistics.counters[0].counts().collect();
        prop_assert_eq!(counts, naive);
        let lengths = |of: fn(&Sample) -> usize| samples.iter().map(|sample| of(sample) as u64).sum::<u64>();
        prop_assert_eq!(totals.statistics.values[0][0], lengths(|sample| sample.3.len()));
        prop_assert_eq!(totals.statistics.values[1][0], lengths(|sample| sample.4.len()));

        // The observed ids are the ids of all lists.
        let lists: [fn(&Sample) -> &Vec<i64>; 2] = [|sample| &sample.3, |sample| &sample.4];
        for (list, ids) in lists.into_iter().zip(&totals.statistics.ids) {
            let mut naive = IdCounts::new();
            samples.iter().for_each(|sample| naive.add(list(sample)));
            prop_assert_eq!((ids.range, ids.distinct()), (naive.range, naive.distinct()));
        }
        let without_window = samples.iter().filter(|sample| sample.1 == 0).count() as u64;
        prop_assert_eq!(totals.statistics.list_counts(2).empty, without_window);
    }
}

/// Counts of changes: the number of sessions, the changes of pairs of lists, and for every list its ids and the ids
/// stored in windows.
type Changes = (u64, Vec<u64>, Vec<[u64; 2]>);

const PAIRS: [[usize; 2]; 6] = [[0, 0], [1, 1], [2, 2], [0, 1], [0, 2], [1, 2]];

/// Returns the changes that were counted, and the count of each id.
fn counted(totals: &SampleTotals) -> (Changes, BTreeMap<i64, u64>) {
    let changes = totals.statistics.changes.as_ref().unwrap();
    assert_eq!(changes.samples(), totals.samples);
    let pairs = PAIRS.iter().map(|pair| changes.group_changes(pair)).collect();
    let ids = totals.statistics.counters[0].counts().collect();
    ((changes.sessions(), pairs, totals.statistics.values.clone()), ids)
}

/// Computes the changes of sorted samples.
fn changes_of(sorted: &[Sample], gap: Option<i64>) -> Changes {
    let (mut sessions, mut pairs, mut values) = (0, vec![0; PAIRS.len()], vec![[0; 2]; 3]);
    for (i, sample) in sorted.iter().enumerate() {
        let (start, end) = ((sample.1 - 2).max(0), sample.1);
        let before = i.checked_sub(1).map(|i| &sorted[i]).filter(|before| before.0 == sample.0);
        let before = before.filter(|before| gap.is_none_or(|gap| sample.1 - before.1 <= gap));
        let [mut stored, mut appended] = [sample.4.len(), (end - start) as usize];
        match before {
            None => sessions += 1,
            Some(before) => {
                let changed = [before.3 != sample.3, before.4 != sample.4, before.1 != sample.1];
                let counts = pairs.iter_mut().zip(PAIRS);
                counts.for_each(|(count, pair)| *count += u64::from(pair.iter().any(|list| changed[*list])));
                stored -= overlap(&before.4, &sample.4);
                appended = (end - before.1.clamp(start, end)) as usize;
            }
        }
        let lengths = [sample.3.len(), sample.4.len(), (end - start) as usize];
        for ((values, length), stored) in values.iter_mut().zip(lengths).zip([0, stored, appended]) {
            *values = [values[0] + length as u64, values[1] + stored as u64];
        }
    }
    (sessions, pairs, values)
}

proptest! {
    #[test]
    fn changes_are_those_of_the_sorted_samples(
        samples in samples(),
        pauses in prop::collection::vec(1..5_i64, 80),
        gap in prop::option::of(1..20_i64),
        (parts, workers, batch_rows) in (1..5_usize, 1..3_usize, 1..20_usize),
        turns in prop::collection::vec(any::<prop::sample::Index>(), 80),
    ) {
        // A log in time order whose parts are read at the same time.
        let mut log = samples;
        let times = pauses.iter().scan(0, |time, pause| { *time += pause; Some(*time) });
        log.iter_mut().zip(times).for_each(|(sample, time)| sample.1 = time);
        let mut left: Vec<_> = log.chunks(log.len().div_ceil(parts)).map(|part| part.iter()).collect();
        let mut read = Vec::new();
        let mut turns = turns.iter().cycle();
        while !left.is_empty() {
            let part = turns.next().unwrap().index(left.len());
            read.extend(left[part].next().cloned());
            left.retain(|part| part.len() > 0);
        }
        let options = EncoderOptions { gap_micros: gap, ..options(true, 1 << 20) };
        let found = counted(&encode(&read, batch_rows, &options, workers).1);
        prop_assert_eq!(&found, &counted(&encode(&log, 7, &options, 1).1));
        log.sort_by_key(|sample| (sample.0, sample.1));
        prop_assert_eq!(found.0, changes_of(&log, gap));
    }

    #[test]
    fn changes_do_not_depend_on_the_order_of_the_log(
        (samples, shuffled) in samples().prop_flat_map(|log| (Just(log.clone()), Just(log).prop_shuffle())),
        gap in prop::option::of(0..10_i64),
        chained in any::<bool>(),
    ) {
        let options = EncoderOptions { gap_micros: gap, ..options(chained, 1 << 20) };
        let [one, other] = [samples, shuffled].map(|log| counted(&encode(&log, 7, &options, 1).1));
        prop_assert_eq!(one, other);
    }
}

#[test]
fn samples_in_time_order_become_what_changed() {
    let sample = |time: i64, bag: &[i64], past: &[i64]| (7, time, 0.0, bag.to_vec(), past.to_vec());
    let samples = [
        sample(1, &[5, 6], &[1, 2, 3]),
        sample(2, &[5, 6], &[2, 3, 4]),
        sample(3, &[5, 6], &[2, 3, 4]),
        sample(3, &[9], &[2, 3, 4]),
        // A late sample: samples of another part of the log may follow it.
        sample(0, &[9], &[2, 3, 4]),
    ];
    let (sorted, totals) = encode(&samples, 10, &options(true, 1 << 20), 1);
    let bytes = |time: i64| sorted.iter().filter(|r| r.1 == time).map(|r| r.3.len()).collect::<Vec<_>>();
    let empty = 8 + 4 + 4 + 16 + 1;
    // A list takes three bytes plus its ids: two ids of 4 bits, three ids of 3 bits. A kept value takes one byte
    // plus, if it is not null, its number, or its length and text.
    assert_eq!(bytes(1), [empty + 3 + 1 + 3 + 2 + 1 + (2 + 4)]);
    assert_eq!(bytes(2), [empty + 3 + 1 + 2 + (2 + 4)]);
    assert_eq!(bytes(0), [empty + 3 + 1 + 3 + 2 + 2 + (2 + 2)]);
    assert_eq!(totals.statistics.values[..2], [[8, 0], [15, 7]]);
    let changes = totals.statistics.changes.unwrap();
    // The counts are as if the late sample had been logged first; its sequence shares no ids with the next one.
    // Among the two samples with equal times, the one with the smaller digest comes first.
    assert_eq!((changes.samples(), changes.sessions()), (5, 1));
    assert_eq!([0, 1, 2].map(|list| changes.changes(list)), [3, 2, 3]);
}

#[test]
fn parts_of_a_log_that_are_read_at_the_same_time_are_encoded_as_one_after_the_other() {
    let in_order: Vec<Sample> =
        (0..60).map(|time| (7, time, 0.0, vec![time / 10; 8], vec![time, time + 1])).collect();
    let parts: Vec<Sample> = (0..20).flat_map(|i| [i, 20 + i, 40 + i].map(|i| in_order[i].clone())).collect();
    let bytes = |samples: &[Sample]| {
        let (sorted, _) = encode(samples, 10, &options(true, 1 << 20), 1);
        sorted.iter().map(|record| record.3.len()).collect::<Vec<_>>()
    };
    let (expected, parts) = (bytes(&in_order), bytes(&parts));
    // The first samples of the later parts follow the first sample of the log; then each part has its own entry.
    let larger: Vec<_> = (0..60).filter(|i| parts[*i] > expected[*i]).collect();
    assert_eq!(larger, [1, 2, 20, 21, 40]);
}

/// Returns the maximum number of chains that are open at once while the sorted records are decoded.
fn most_open(sorted: &[Sorted], options: &EncoderOptions) -> usize {
    let list = |name: &str| ListColumn { name: name.into(), vocabulary: None };
    let mut decoder = DeltaDecoder::new(options, vec![list("bag"), list("past"), list("seen")], false);
    let slice = Arc::new(Slice { number: 1, positions: (0..5000).collect(), columns: vec![vec![7; 5000]] });
    let mut most = 0;
    for (session, time, _, record) in sorted {
        let run = SessionRun {
            session: *session,
            times: &[*time],
            keys: None,
            origins: None,
            records: &BinaryArray::from_iter_values([record]),
            slices: &[Arc::clone(&slice)],
        };
        decoder.push(&run, &mut |_| {}).unwrap();
        most = most.max(decoder.open_chains());
    }
    assert_eq!(decoder.open_chains(), 0, "every chain of a session ends with its last record");
    most
}

#[test]
fn few_chains_are_open_in_a_log_of_any_order() {
    let in_order: Vec<Sample> =
        (0..2000).map(|time| (7, time, 0.0, vec![time / 10; 8], vec![time, time + 1])).collect();
    let newest_first: Vec<Sample> = in_order.iter().rev().cloned().collect();
    let shuffled: Vec<Sample> = (0..2000).map(|i| in_order[i * 1237 % 2000].clone()).collect();
    // A sample has lists of 10 ids, which count as 128 bytes with their headers, so four chains may be open.
    let options = options(true, 64 * 4 * 128);
    let open = |samples: &[Sample]| {
        let (sorted, totals) = encode(samples, 64, &options, 1);
        assert_eq!(decode(&sorted, &options, &totals).len(), samples.len());
        (most_open(&sorted, &options), sorted.iter().map(|record| record.3.len()).sum::<usize>())
    };
    let (chains, bytes) = open(&in_order);
    assert_eq!(chains, 1);
    assert_eq!(open(&newest_first).0, 0, "every sample is a chain of its own, of which nothing is held");
    let (chains, shuffled_bytes) = open(&shuffled);
    assert!((1..=8).contains(&chains), "{chains} chains are open");
    assert!(shuffled_bytes > bytes, "the samples are stored whole");
}

/// Returns the sizes of the batches of samples with windows of `length` ids in a slice of `rows` ids.
fn batches_with_slices(samples: i64, length: i64, rows: i64) -> Vec<usize> {
    let options = without_columns();
    let list = ListColumn { name: "seen".into(), vocabulary: None };
    let mut decoder = DeltaDecoder::new(&options, vec![list], false);
    let mut sizes = Vec::new();
    let mut give = |batch: RecordBatch| {
        sizes.push(batch.num_rows());
    };
    let mut slice = Arc::new(Slice::default());
    for sample in 0..samples {
        let start = sample * length;
        if slice.positions.last().is_none_or(|last| *last < start + length - 1) {
            let positions: Vec<i64> = (start..start + rows).collect();
            slice = Arc::new(Slice { number: sample + 1, columns: vec![positions.clone()], positions });
        }
        let mut record = super::record::RecordWriter::new(options.shape());
        record.start(0, 0, [].into_iter(), [start, start + length].into_iter());
        let run = SessionRun {
            session: 1,
            times: &[sample],
            keys: None,
            origins: None,
            records: &BinaryArray::from_iter_values([record.bytes()]),
            slices: &[Arc::clone(&slice)],
        };
        decoder.push(&run, &mut give).unwrap();
    }
    decoder.flush(&mut give).unwrap();
    sizes
}

#[test]
fn large_slices_do_not_make_small_batches() {
    // Two slices with more ids than the limit of a batch: each may end a batch, but not every sample does.
    let sizes = batches_with_slices(3000, 1000, 3 << 19);
    assert_eq!(sizes.iter().sum::<usize>(), 3000);
    assert!(sizes.len() <= 4, "{sizes:?}");
}

#[test]
fn a_slice_may_begin_with_an_empty_window() {
    let options = without_columns();
    let mut decoder =
        DeltaDecoder::new(&options, vec![ListColumn { name: "seen".into(), vocabulary: None }], false);
    let mut lists: Vec<Vec<i64>> = Vec::new();
    let mut give = |batch: RecordBatch| {
        let seen = batch.column(2).as_list_view::<i32>();
        let list = |row: usize| seen.value(row).as_primitive::<Int64Type>().values().to_vec();
        lists.extend((0..batch.num_rows()).map(list));
    };
    let slices = [10, 20].map(|first| {
        Arc::new(Slice {
            number: first,
            positions: (first..first + 3).collect(),
            columns: vec![(first..first + 3).collect()],
        })
    });
    for (time, (slice, start, end)) in (0..).zip([(0, 10, 12), (1, 0, 0), (1, 21, 23)]) {
        let mut record = super::record::RecordWriter::new(options.shape());
        record.start(0, 0, [].into_iter(), [start, end].into_iter());
        let run = SessionRun {
            session: 1,
            times: &[time],
            keys: None,
            origins: None,
            records: &BinaryArray::from_iter_values([record.bytes()]),
            slices: &[Arc::clone(&slices[slice])],
        };
        decoder.push(&run, &mut give).unwrap();
    }
    decoder.flush(&mut give).unwrap();
    assert_eq!(lists, [vec![10, 11], vec![], vec![21, 22]]);
}

/// Runs the fold operator on samples in two parts, in batches of `batch_rows`, after its specification was
/// serialized and parsed. Returns its records and totals.
fn folded(
    samples: &[Sample],
    batch_rows: usize,
    options: &EncoderOptions,
    workers: Option<usize>,
) -> (Vec<Sorted>, SampleTotals) {
    let (encoder, statistics) = (options.clone(), wanted());
    let spec = FoldSpec { names: names(), encoder, statistics, workers, row_bytes: 256 };
    let spec: FoldSpec = serde_json::from_str(&serde_json::to_string(&spec).unwrap()).unwrap();
    let mut parts = [Vec::new(), Vec::new()];
    for (i, samples) in samples.chunks(batch_rows).enumerate() {
        parts[i % 2].push(batch(samples));
    }
    let input = MemorySourceConfig::try_new_exec(&parts, schema(), None).unwrap();
    let budget = CountBudget::new(1 << 30);
    let fold = Arc::new(FoldExec::new(spec, budget.clone(), input).unwrap());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let rows = runtime.block_on(collect(Arc::clone(&fold) as _, Arc::default())).unwrap();
    assert_eq!(fold.read().0, samples.len() as u64);
    let (mut totals, mut sorted) = (TotalsReader::new(&wanted(), &budget), Vec::new());
    for rows in rows {
        let flags = rows.column_by_name(TOTALS).unwrap().as_boolean();
        let parts = filter_record_batch(&rows, flags).unwrap();
        assert_eq!(totals.read(&parts).unwrap().num_rows(), 0);
        sorted.extend(read_records(&filter_record_batch(&rows, &not(flags).unwrap()).unwrap()));
    }
    sorted.sort();
    (sorted, totals.finish().unwrap().unwrap())
}

proptest! {
    #![proptest_config(onefold_property::cases(64))]

    #[test]
    fn parts_that_share_workers_and_parts_alone_give_the_samples(
        samples in samples(),
        batch_rows in 1..20_usize,
        state_bytes in prop_oneof![Just(1 << 20), 0..4_000_usize],
    ) {
        let options = options(true, state_bytes);
        let (sorted, expected) = encode(&samples, batch_rows, &options, 1);
        let whole = decode(&sorted, &options, &expected);
        let counts = |totals: &SampleTotals| -> BTreeMap<i64, u64> {
            totals.statistics.counters[0].counts().collect()
        };
        for workers in [Some(1), Some(3), None] {
            let (sorted, totals) = folded(&samples, batch_rows, &options, workers);
            prop_assert_eq!((totals.samples, totals.digest), (expected.samples, expected.digest));
            prop_assert_eq!(counts(&totals), counts(&expected), "{:?}", workers);
            prop_assert_eq!(totals.statistics.columns.samples, samples.len() as u64);
            for list in 0..3 {
                let ids = |totals: &SampleTotals| totals.statistics.ids[list].range;
                prop_assert_eq!(ids(&totals), ids(&expected));
            }
            prop_assert_eq!(decode(&sorted, &options, &totals), whole.clone());
        }
    }
}

#[test]
fn counts_that_do_not_fit_name_the_memory_limit_of_their_process() {
    let samples: Vec<Sample> = (0..500).map(|i| (i, i, 0.0, vec![i, i + 1000], Vec::new())).collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    for (workers, limit) in
        [(Some(2), "the option `memory_limit`"), (None, "`--memory-limit` of the executors")]
    {
        let (encoder, statistics) = (options(true, 1 << 20), wanted());
        let spec = FoldSpec { names: names(), encoder, statistics, workers, row_bytes: 256 };
        let input = MemorySourceConfig::try_new_exec(&[vec![batch(&samples)]], schema(), None).unwrap();
        let fold = FoldExec::new(spec, CountBudget::new(4000), input).unwrap();
        let error = runtime.block_on(collect(Arc::new(fold), Arc::default())).unwrap_err();
        let error = crate::error::Error::from(error).to_string();
        assert!(error.contains("`ids`") && error.contains(limit), "{error}");
    }
}

#[test]
fn write_specs_are_restored_from_their_serialized_form() {
    let text = "format_version = 1\n[sources]\nlog = \"x\"\n[samples]\nquery = \"\"\n[session]\nuser = \"user\"\n\
                gap = \"30m\"\ntime = \"time\"\n[partition]\ncolumns = [\"split\"]\nby = \"hour\"\n\
                [features]\nitem = { kind = \"label\" }\nx = { kind = \"dense\" }\n";
    let config = crate::config::Config::parse(std::path::Path::new("dataset.toml"), text).unwrap();
    let filter = "split=train,hour>=7".parse().unwrap();
    let spec = WriteSpec {
        location: "s3://bucket/dataset".into(),
        schema: config.schema.clone(),
        options: WriterOptions {
            sessions: Some(config.session.clone()),
            ..WriterOptions::new(Order::SessionHash)
        },
        filter,
        partition_columns: vec![
            PartitionColumn::new("split", PartitionType::Text),
            PartitionColumn::new("hour", PartitionType::Integer),
        ],
        lacks: vec![((PartitionKey::parse("split=train/hour=07").unwrap(), 1), vec!["x".to_owned()])],
        cut: CutSpec {
            partitions: Partitions::of(&config),
            encoded: options(true, 7),
            digested: true,
            buckets: Buckets { number: 10, in_range: 5 },
            timelines: vec![vec!["seen".to_owned()]],
            place_of_slices: crate::sessionize::place_of_slices(&config),
            numbered_by: vec![TIME.to_owned()],
        },
    };
    let sent: WriteSpec = serde_json::from_str(&serde_json::to_string(&spec).unwrap()).unwrap();
    assert_eq!(format!("{sent:?}"), format!("{spec:?}"));
    let chosen = |path| sent.choice().unwrap().matches(&PartitionKey::parse(path).unwrap()).unwrap();
    assert!(chosen("split=train/hour=07") && !chosen("split=train/hour=06") && !chosen("split=test/hour=07"));
}
