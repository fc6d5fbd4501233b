//! Chooses the encodings of a file's columns by trying them on a part of its first row group.
//!
//! The size of a candidate is the compressed size that the Parquet writer produces for the sampled values. A
//! dictionary needs an estimate, because it is stored once for all values of a row group: its page grows with
//! the number of distinct values, which is counted approximately over the whole row group (linear counting,
//! Whang et al. 1990). The smallest candidate is chosen, but a candidate that is slower to read must be
//! smaller by a margin. The choice depends only on the rows.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, Int64Array, RecordBatch};
use arrow::compute::{concat, filter, is_not_null};
use arrow::datatypes::{DataType, Float32Type, Int32Type, Int64Type, TimestampMicrosecondType};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, Encoding, ZstdLevel};
use parquet::errors::Result as ParquetResult;
use parquet::file::properties::{EnabledStatistics, WriterProperties};

use xxhash_rust::xxh3::xxh3_64;

use crate::Result;
use crate::digest::scramble;
use crate::lists::Lists;

/// The largest number of sampled values of a column.
const SAMPLE_VALUES: usize = 1 << 16;
/// A sample has at most the number of values divided by this, so that it costs little compared to writing the
/// file.
const SAMPLE_SHARE: usize = 4;
/// The smallest sample of a column with enough values. In smaller samples, page headers would dominate.
const LEAST_VALUES: usize = 1 << 12;
/// The number of evenly spaced runs of rows that form a sample.
const RUNS: usize = 16;
/// A dictionary, or values split into bytes, must be smaller than this share of the delta-packed size,
/// because delta-packed values are read 1.5 times as fast.
const AGAINST_PACKED: f64 = 0.90;
/// A dictionary must be smaller than this share of any other encoding.
const AGAINST_PLAIN: f64 = 0.95;
/// Values split into bytes must be smaller than this share of plain values, because they must be reassembled.
const SPLIT_AGAINST_PLAIN: f64 = 0.98;
/// The size in bytes of a dictionary page at which the Parquet writer abandons the dictionary.
const DICTIONARY_BYTES: f64 = (1 << 20) as f64;

/// The encoding of a column's values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Encoded {
    /// Indices into a dictionary.
    Dictionary,
    /// The values themselves, with this encoding.
    Values(Encoding),
}

/// Returns the compression of pages.
pub(super) fn compression() -> ParquetResult<Compression> {
    Ok(Compression::ZSTD(ZstdLevel::try_new(3)?))
}

/// A sample of a column's values, without nulls.
#[derive(Debug)]
pub(super) struct Sample {
    values: ArrayRef,
    /// The approximate numbers of distinct values in the sample and in the whole row group.
    distinct: (f64, f64),
    /// The number of values in the row group.
    total: usize,
}

/// The encoded sizes of a sample.
#[derive(Debug)]
struct Tried {
    /// The candidates other than the dictionary, in the order in which they are compared.
    values: Vec<(Encoding, u64)>,
    dictionary: f64,
}

impl Sample {
    /// Samples a column of numbers or texts.
    pub(super) fn of_values(column: &ArrayRef) -> Result<Self> {
        let column = match column.null_count() {
            0 => Arc::clone(column),
            _ => filter(column, &is_not_null(column)?)?,
        };
        let total = column.len();
        let wanted = sample_size(total);
        let values = if wanted == total {
            Arc::clone(&column)
        } else {
            let length = wanted / RUNS;
            let runs: Vec<_> = (0..RUNS).map(|run| column.slice(run * total / RUNS, length)).collect();
            concat(&runs.iter().map(AsRef::as_ref).collect::<Vec<&dyn Array>>())?
        };
        let distinct = (count_distinct(&values), count_distinct(&column));
        Ok(Self { values, distinct, total })
    }

    /// Samples the ids of lists.
    pub(super) fn of_lists(columns: &[Lists]) -> Self {
        let rows: usize = columns.iter().map(|lists| lists.len()).sum();
        let total = columns.iter().flat_map(|lists| (0..lists.len()).map(|row| lists.size(row))).sum();
        let wanted = sample_size(total);
        let run_ids = if wanted == total { total } else { wanted / RUNS };
        let (mut ids, mut distinct) = (Vec::with_capacity(wanted), Distinct::default());
        let (mut run, mut run_end, mut last): (usize, usize, &[i64]) = (0, 0, &[]);
        for (row, list) in columns.iter().flat_map(|lists| lists.iter()).enumerate() {
            if !std::ptr::eq(list, last) {
                list.iter().for_each(|id| distinct.add(*id as u64));
            }
            if run < RUNS && row >= run * rows / RUNS && ids.len() >= run_end {
                (run, run_end) = (run + 1, ids.len() + run_ids);
            }
            if ids.len() < run_end {
                ids.extend_from_slice(&list[..list.len().min(run_end - ids.len())]);
            }
            last = list;
        }
        let values: ArrayRef = Arc::new(Int64Array::from(ids));
        Self { distinct: (count_distinct(&values), distinct.estimate()), values, total }
    }

    /// Chooses the encoding.
    ///
    /// # Errors
    ///
    /// Returns the Parquet writer's error if it cannot encode the values.
    pub(super) fn choose(&self) -> ParquetResult<Encoded> {
        let candidates = match self.values.data_type() {
            DataType::Float32 => &[Encoding::PLAIN, Encoding::BYTE_STREAM_SPLIT][..],
            DataType::Utf8 => &[Encoding::PLAIN, Encoding::DELTA_LENGTH_BYTE_ARRAY],
            // Most bytes of ids far below 2^63 are zero, and take almost no space if split. With few ids,
            // zstd's code tables would dominate.
            _ if self.values.len() >= LEAST_VALUES => {
                &[Encoding::DELTA_BINARY_PACKED, Encoding::PLAIN, Encoding::BYTE_STREAM_SPLIT]
            }
            _ => &[Encoding::DELTA_BINARY_PACKED, Encoding::PLAIN],
        };
        if self.values.is_empty() {
            return Ok(Encoded::Values(candidates[0]));
        }
        let size = |encoding: &Encoding| Ok((*encoding, self.size(Encoded::Values(*encoding))?.0));
        let values = candidates.iter().map(size).collect::<ParquetResult<_>>()?;
        Ok(Tried { values, dictionary: self.dictionary_size()? }.best())
    }

    /// Estimates the size of the sample with a dictionary: its share of the row group's dictionary, and its
    /// indices.
    fn dictionary_size(&self) -> ParquetResult<f64> {
        let (here, all) = (self.distinct.0.max(1.0), self.distinct.1.max(1.0));
        let value_bytes = match self.values.as_string_opt::<i32>() {
            // Each text is stored with a length of 4 bytes.
            Some(texts) => 4.0 + texts.values().len() as f64 / texts.len().max(1) as f64,
            None => 8.0,
        };
        if all * value_bytes > DICTIONARY_BYTES {
            return Ok(f64::INFINITY);
        }
        let (size, page) = self.size(Encoded::Dictionary)?;
        let share = self.values.len() as f64 / self.total as f64;
        let bits = |distinct: f64| distinct.log2().ceil().max(1.0);
        let indices = (size - page) as f64 * bits(all) / bits(here);
        Ok(indices + page as f64 * (all / here) * share)
    }

    /// Returns the size of the encoded sample in bytes, and the size of its dictionary page, which is
    /// included.
    fn size(&self, encoded: Encoded) -> ParquetResult<(u64, u64)> {
        let properties = WriterProperties::builder()
            .set_compression(compression()?)
            .set_statistics_enabled(EnabledStatistics::None)
            .set_dictionary_enabled(encoded == Encoded::Dictionary);
        let properties = match encoded {
            Encoded::Dictionary => properties,
            Encoded::Values(encoding) => properties.set_encoding(encoding),
        };
        let batch = RecordBatch::try_from_iter([("values", Arc::clone(&self.values))])?;
        let mut writer = ArrowWriter::try_new(std::io::sink(), batch.schema(), Some(properties.build()))?;
        writer.write(&batch)?;
        let metadata = writer.close()?;
        let column = metadata.row_group(0).column(0);
        let page = column.dictionary_page_offset().map_or(0, |start| column.data_page_offset() - start);
        Ok((column.byte_range().1, u64::try_from(page).unwrap_or(0)))
    }
}

impl Tried {
    fn best(self) -> Encoded {
        let beats = |(encoding, size): &(Encoding, u64)| {
            let share =
                if *encoding == Encoding::DELTA_BINARY_PACKED { AGAINST_PACKED } else { AGAINST_PLAIN };
            self.dictionary < share * *size as f64
        };
        if self.values.iter().all(beats) {
            return Encoded::Dictionary;
        }
        let mut values = self.values.into_iter();
        let first = values.next();
        let best =
            values.fold(first, |best, next| best.map(|best| if replaces(next, best) { next } else { best }));
        best.map_or(Encoded::Dictionary, |(encoding, _)| Encoded::Values(encoding))
    }
}

/// Returns whether an encoding of values is better than the best one so far.
fn replaces((encoding, size): (Encoding, u64), (best, best_size): (Encoding, u64)) -> bool {
    let share = match (encoding, best) {
        (Encoding::BYTE_STREAM_SPLIT, Encoding::DELTA_BINARY_PACKED) => AGAINST_PACKED,
        (Encoding::BYTE_STREAM_SPLIT, _) => SPLIT_AGAINST_PLAIN,
        _ => 1.0,
    };
    (size as f64) < share * best_size as f64
}

/// Returns the number of values to sample from `total` values.
fn sample_size(total: usize) -> usize {
    (total / SAMPLE_SHARE).clamp(LEAST_VALUES, SAMPLE_VALUES).min(total)
}

fn count_distinct(values: &ArrayRef) -> f64 {
    let mut distinct = Distinct::default();
    match values.data_type() {
        DataType::Float32 => {
            let floats = values.as_primitive::<Float32Type>().values();
            floats.iter().for_each(|x| distinct.add(u64::from(x.to_bits())));
        }
        DataType::Int32 => {
            let ints = values.as_primitive::<Int32Type>().values();
            ints.iter().for_each(|x| distinct.add(*x as u64));
        }
        DataType::Utf8 => {
            let texts = values.as_string::<i32>().iter().flatten();
            texts.for_each(|text| distinct.add(xxh3_64(text.as_bytes())));
        }
        DataType::Timestamp(..) => {
            let times = values.as_primitive::<TimestampMicrosecondType>().values();
            times.iter().for_each(|x| distinct.add(*x as u64));
        }
        _ => {
            let ids = values.as_primitive::<Int64Type>().values();
            ids.iter().for_each(|x| distinct.add(*x as u64));
        }
    }
    distinct.estimate()
}

/// Counts distinct numbers approximately by the number of distinct hashes.
struct Distinct {
    words: Vec<u64>,
    set: u32,
}

/// The number of bits of a hash. 2²⁰ hashes take 128 KiB and count a million numbers with an error of less
/// than a percent.
const HASH_BITS: u32 = 20;

impl Default for Distinct {
    fn default() -> Self {
        Self { words: vec![0; 1 << (HASH_BITS - 6)], set: 0 }
    }
}

impl Distinct {
    fn add(&mut self, number: u64) {
        let hash = scramble(number) >> (64 - HASH_BITS);
        let (word, bit) = (&mut self.words[(hash >> 6) as usize], 1_u64 << (hash & 63));
        self.set += u32::from(*word & bit == 0);
        *word |= bit;
    }

    fn estimate(&self) -> f64 {
        let bits = f64::from(1_u32 << HASH_BITS);
        let free = (bits - f64::from(self.set)).max(1.0);
        bits * (bits / free).ln()
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::{Float32Array, Int32Array, ListArray};

    use super::*;

    fn chosen(numbers: impl Array + 'static) -> Encoded {
        let numbers: ArrayRef = Arc::new(numbers);
        Sample::of_values(&numbers).unwrap().choose().unwrap()
    }

    fn hash(number: i64) -> i64 {
        scramble(number as u64 + 1) as i64
    }

    #[test]
    fn the_smallest_encoding_is_chosen() {
        let packed = Encoded::Values(Encoding::DELTA_BINARY_PACKED);
        let plain = Encoded::Values(Encoding::PLAIN);
        let split = Encoded::Values(Encoding::BYTE_STREAM_SPLIT);
        assert_eq!(chosen(Int64Array::from_iter_values(1_000_000..1_050_000)), packed, "counted");
        assert_eq!(chosen(Int64Array::from_iter_values((0..50_000).map(|i| hash(i) >> 50))), packed, "small");
        assert_eq!(
            chosen(Int64Array::from_iter_values((0..50_000).map(|i| hash(hash(i) >> 55)))),
            Encoded::Dictionary
        );
        assert_eq!(chosen(Int64Array::from_iter_values((0..50_000).map(hash))), plain, "no order");
        // Few of the ids are frequent: their bytes repeat, their differences do not.
        let skewed = |i: i64| 100_000.0 * (hash(i).unsigned_abs() as f64 / i64::MAX as f64).powi(4);
        assert_eq!(chosen(Int64Array::from_iter_values((0..200_000).map(|i| skewed(i) as i64))), split);
        assert_eq!(chosen(Int32Array::from_iter_values((0..9_000).map(|i| i / 3))), packed);
        assert_eq!(
            chosen(Float32Array::from_iter_values((0..50_000).map(|i| (i as f32).sqrt().sin()))),
            split
        );
        assert_eq!(
            chosen(Float32Array::from_iter_values((0..50_000).map(|i| ((hash(i) >> 58) as f32).exp()))),
            Encoded::Dictionary
        );
        assert_eq!(chosen(Float32Array::from(vec![1.0; 50_000])), Encoded::Dictionary);
        assert_eq!(chosen(Int64Array::from(vec![None; 9])), packed, "there is nothing to encode");
    }

    #[test]
    fn a_dictionary_wins_by_its_margin_only() {
        let tried =
            |values: &[(Encoding, u64)], dictionary| Tried { values: values.to_vec(), dictionary }.best();
        let (packed, plain) = (Encoding::DELTA_BINARY_PACKED, Encoding::PLAIN);
        let split = Encoding::BYTE_STREAM_SPLIT;
        let ids = [(packed, 1000), (plain, 1100)];
        assert_eq!(tried(&ids, 899.0), Encoded::Dictionary);
        assert_eq!(tried(&ids, 901.0), Encoded::Values(packed));
        assert_eq!(tried(&[(packed, 1000), (plain, 940)], 899.0), Encoded::Values(plain));
        assert_eq!(tried(&[(plain, 1000), (split, 1000)], 960.0), Encoded::Values(plain));
        assert_eq!(tried(&[(plain, 1000), (split, 970)], 960.0), Encoded::Values(split));
        assert_eq!(tried(&[(packed, 1000), (plain, 1100), (split, 910)], 960.0), Encoded::Values(packed));
        assert_eq!(tried(&[(packed, 1000), (plain, 1100), (split, 890)], 960.0), Encoded::Values(split));
        assert_eq!(tried(&[(packed, 1000), (plain, 990), (split, 960)], 960.0), Encoded::Values(split));
    }

    /// The dictionary of a part would be estimated too small or too large for the whole.
    #[test]
    fn a_dictionary_is_judged_by_the_whole_row_group() {
        // Each of 100,000 values occurs twice, so the sample hardly contains a value twice.
        let ids = (0..200_000).map(|i| hash(i % 100_000)).collect::<Vec<i64>>();
        let sample = Sample::of_values(&(Arc::new(Int64Array::from(ids)) as ArrayRef)).unwrap();
        assert_eq!(sample.values.len(), 50_000);
        let (part, whole) = (sample.dictionary_size().unwrap(), 100_000.0 * 8.0 + 200_000.0 * 17.0 / 8.0);
        assert!((part * 4.0 / whole - 1.0).abs() < 0.1, "{part} for a quarter of {whole}");
    }

    #[test]
    fn lists_are_sampled_in_runs_of_rows() {
        let lists = (0..60_000_i64).map(|row| Some([Some(row), Some(row)]));
        let lists: ArrayRef = Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>(lists));
        let (first, second) = (lists.slice(0, 25_001), lists.slice(25_001, 34_999));
        let lists = [&first, &second].map(|part| Lists::of(part).unwrap());
        let sample = Sample::of_lists(&lists);
        let ids = sample.values.as_primitive::<Int64Type>().values();
        assert_eq!((ids.len(), sample.total), (30_000, 120_000));
        for run in 0..RUNS {
            let start = (run * 60_000 / RUNS) as i64;
            assert_eq!(ids[run * 30_000 / RUNS..][..3], [start, start, start + 1]);
        }
        assert!((sample.distinct.1 / 60_000.0 - 1.0).abs() < 0.02, "{:?}", sample.distinct);
    }
}
