//! Which samples a report writes again, and which it puts into another order.

use std::collections::BTreeMap;

use arrow::datatypes::TimestampMicrosecondType;

use super::gathered::{Choice, Stretch};
use onefold_datasets::scan::OpenFiles;
use onefold_datasets::{Result, Snapshot, TIME_COLUMN};

/// Samples are written again from no fewer places of the dataset than this, if it has as many row groups.
const PLACES: usize = 8;
/// A stretch of time is to have so many samples, two of the largest batches, and so many decoded bytes, a row group: a
/// shorter one would hold less of each session than a row group in arrival order does.
const STRETCH_SAMPLES: u64 = 16_384;
const STRETCH_BYTES: u64 = 64 << 20;
/// And there are no more stretches than this.
const MOST_STRETCHES: u64 = 16;
/// Times of a partition that are held to find where stretches begin.
const TIMES_HELD: u64 = 1 << 20;

/// A row group of a dataset.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowGroup<'a> {
    pub(super) partition: usize,
    pub(super) file: &'a OpenFiles,
    pub(super) index: usize,
    pub(super) rows: usize,
}

/// All row groups in the order of the samples. `files` are those of `snapshot`, in its order.
pub(super) fn row_groups<'a>(snapshot: &Snapshot, files: &'a [OpenFiles]) -> Vec<RowGroup<'a>> {
    let partitions = snapshot.partitions.iter().enumerate();
    let partitions = partitions.flat_map(|(number, partition)| partition.files.iter().map(move |_| number));
    let of_file = |(partition, file): (usize, &'a OpenFiles)| {
        (0..file.row_groups()).map(move |index| RowGroup { partition, file, index, rows: file.rows(index) })
    };
    partitions.zip(files).flat_map(of_file).collect()
}

/// How many of the first samples of each row group are written again: about `samples` together, from row groups spread
/// evenly over all.
pub(super) fn spread(row_groups: &[RowGroup], samples: usize) -> Vec<usize> {
    let rows: Vec<usize> = row_groups.iter().map(|row_group| row_group.rows).collect();
    let (count, total) = (rows.len(), rows.iter().sum::<usize>());
    if total <= samples {
        return rows;
    }
    let mean = (total / count.max(1)).max(1);
    let chosen = samples.div_ceil(mean).max(PLACES).min(count);
    let mut taken = vec![0; count];
    for place in 0..chosen {
        let index = (2 * place + 1) * count / (2 * chosen);
        taken[index] = rows[index].min(samples.div_ceil(chosen));
    }
    taken
}

/// Decoded bytes of the mean sample, with all its lists.
fn bytes_per_sample(snapshot: &Snapshot) -> u64 {
    let statistics = &snapshot.statistics;
    let ids = statistics.features.values().fold(0_u64, |sum, feature| sum.saturating_add(feature.values));
    let floats = snapshot.schema.float_columns().count() as u64;
    16 + 4 * floats + ids.saturating_mul(8) / statistics.samples.max(1)
}

/// Which samples are put into the order that the dataset does not have, so that they take `memory` bytes at most.
pub(super) fn choose(snapshot: &Snapshot, row_groups: &[RowGroup], memory: u64) -> Result<Choice> {
    let samples = snapshot.statistics.samples;
    let most = (memory / bytes_per_sample(snapshot)).max(1);
    if samples <= most {
        return Ok(Choice::Everything);
    }
    if !snapshot.order.is_clustered() {
        return Ok(Choice::Sessions((u128::from(u64::MAX) * u128::from(most) / u128::from(samples)) as u64));
    }
    let count = (most / STRETCH_SAMPLES).min(memory / STRETCH_BYTES).clamp(1, MOST_STRETCHES);
    let size = most / count;
    // The middles of as many equal parts of all samples: partition and place in it.
    let mut places: BTreeMap<usize, Vec<u64>> = BTreeMap::new();
    for part in 0..count {
        let mut place = (2 * part + 1) * samples / (2 * count);
        let mut partitions = snapshot.partitions.iter().enumerate();
        let found = partitions.find(|(_, partition)| {
            let inside = place < partition.samples;
            place -= if inside { 0 } else { partition.samples };
            inside
        });
        let Some((number, _)) = found else { continue };
        places.entry(number).or_default().push(place);
    }
    let mut stretches = Vec::new();
    for (partition, places) in places {
        let samples = snapshot.partitions[partition].samples;
        if size >= samples {
            stretches.push(Stretch { partition, from: i64::MIN, until: None });
            continue;
        }
        let (times, every) = some_times(row_groups, partition, samples)?;
        stretches.extend(
            places
                .into_iter()
                .filter_map(|place| stretch(&times, every, partition, place.min(samples - size), size)),
        );
    }
    Ok(Choice::Stretches(stretches))
}

/// The times of every so many samples of a partition, in order, and how many that is.
fn some_times(row_groups: &[RowGroup], partition: usize, samples: u64) -> Result<(Vec<i64>, u64)> {
    let every = samples.div_ceil(TIMES_HELD).max(1);
    let mut times = Vec::new();
    let mut next = 0;
    for row_group in row_groups.iter().filter(|row_group| row_group.partition == partition) {
        let column = row_group.file.numbers::<TimestampMicrosecondType>(row_group.index, TIME_COLUMN)?;
        times.extend(column.iter().skip(next).step_by(every as usize));
        next = (next + every as usize - column.len() % every as usize) % every as usize;
    }
    times.sort_unstable();
    Ok((times, every))
}

/// The stretch of about `size` samples from the `place`th on, of which the times of every so many are known.
fn stretch(times: &[i64], every: u64, partition: usize, place: u64, size: u64) -> Option<Stretch> {
    let from = *times.get((place / every) as usize)?;
    let until = times.get((place + size).div_ceil(every) as usize).copied();
    // Samples of one instant cannot be told apart.
    let until = match until {
        Some(until) if until <= from => times[times.partition_point(|time| *time <= from)..].first().copied(),
        other => other,
    };
    Some(Stretch { partition, from, until })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stretches_have_about_the_samples_asked_for() {
        let times: Vec<i64> = (0..1_000).collect();
        let of = |place, size| stretch(&times, 10, 3, place, size).unwrap();
        assert_eq!(of(5_000, 100), Stretch { partition: 3, from: 500, until: Some(510) });
        assert_eq!(of(9_900, 100), Stretch { partition: 3, from: 990, until: None });
        let ties = [1, 1, 1, 1, 2, 3];
        let all = stretch(&ties, 1, 0, 1, 2).unwrap();
        assert_eq!((all.from, all.until), (1, Some(2)));
        assert_eq!(stretch(&ties, 1, 0, 9, 1), None);
    }
}
