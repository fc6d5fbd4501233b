//! Selects the samples that a report writes again, and those that it sorts into another order.

use std::collections::BTreeMap;

use arrow::datatypes::TimestampMicrosecondType;

use super::gathered::{Choice, Stretch};
use onefold_datasets::scan::OpenFiles;
use onefold_datasets::{FileSet, Result, Snapshot, TIME_COLUMN};
use onefold_storage::Storage;

/// The least number of places in the dataset from which samples are written again, if it has enough row groups.
const PLACES: usize = 8;
/// The least size of a stretch of time: a number of samples (two of the largest batches), and a number of decoded
/// bytes (a row group). A shorter stretch would contain fewer samples of each session than a row group in arrival
/// order.
const STRETCH_SAMPLES: u64 = 16_384;
const STRETCH_BYTES: u64 = 64 << 20;
/// The largest number of stretches.
const MOST_STRETCHES: u64 = 16;
/// The largest number of a partition's times that are kept to find the starts of stretches.
const TIMES_HELD: u64 = 1 << 20;

/// A row group of a dataset.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowGroup<'a> {
    pub(super) partition: usize,
    pub(super) set: &'a FileSet,
    pub(super) index: usize,
    pub(super) rows: usize,
}

/// Returns all row groups in the order of the samples, as the manifests describe them.
pub(super) fn row_groups<'a>(snapshot: &'a Snapshot) -> Vec<RowGroup<'a>> {
    let partitions = snapshot.partitions.iter().enumerate();
    let sets =
        partitions.flat_map(|(number, partition)| partition.files.iter().map(move |set| (number, set)));
    let of_set = |(partition, set): (usize, &'a FileSet)| {
        let numbered = set.row_groups.iter().enumerate();
        numbered.map(move |(index, row_group)| RowGroup {
            partition,
            set,
            index,
            rows: row_group.samples as usize,
        })
    };
    sets.flat_map(of_set).collect()
}

/// Opens the files of row groups when they are read. Row groups are read in order, so only the files of one set are
/// open at a time.
pub(super) struct Files<'a> {
    storage: &'a Storage,
    snapshot: &'a Snapshot,
    open: Option<OpenFiles>,
}

impl<'a> Files<'a> {
    pub(super) fn new(storage: &'a Storage, snapshot: &'a Snapshot) -> Self {
        Self { storage, snapshot, open: None }
    }

    /// Returns the files of a row group.
    pub(super) fn of(&mut self, row_group: &RowGroup) -> Result<&OpenFiles> {
        let open = match self.open.take().filter(|open| open.path == row_group.set.path()) {
            Some(open) => open,
            None => OpenFiles::open(self.storage, self.snapshot, row_group.set)?,
        };
        Ok(self.open.insert(open))
    }
}

/// Returns the number of first samples of each row group that are written again: about `samples` in total, from row
/// groups that are spread evenly over the dataset.
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

/// Returns the decoded bytes of a mean sample with all its lists.
fn bytes_per_sample(snapshot: &Snapshot) -> u64 {
    let statistics = &snapshot.statistics;
    let ids = statistics.features.values().fold(0_u64, |sum, feature| sum.saturating_add(feature.values));
    snapshot.schema.sample_bytes(false) + ids.saturating_mul(8) / statistics.samples.max(1)
}

/// Selects the samples that are sorted into the order that the dataset does not have. They take at most `memory`
/// bytes.
pub(super) fn choose(files: &mut Files, row_groups: &[RowGroup], memory: u64) -> Result<Choice> {
    let snapshot = files.snapshot;
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
    // The middles of `count` equal parts of all samples, as a partition and a place in it.
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
        let (times, every) = some_times(files, row_groups, partition, samples)?;
        stretches.extend(
            places
                .into_iter()
                .filter_map(|place| stretch(&times, every, partition, place.min(samples - size), size)),
        );
    }
    Ok(Choice::Stretches(stretches))
}

/// Returns the times of every n-th sample of a partition, in order, and n.
fn some_times(
    files: &mut Files,
    row_groups: &[RowGroup],
    partition: usize,
    samples: u64,
) -> Result<(Vec<i64>, u64)> {
    let every = samples.div_ceil(TIMES_HELD).max(1);
    let mut times = Vec::new();
    let mut next = 0;
    for row_group in row_groups.iter().filter(|row_group| row_group.partition == partition) {
        let column =
            files.of(row_group)?.numbers::<TimestampMicrosecondType>(row_group.index, TIME_COLUMN)?;
        times.extend(column.iter().skip(next).step_by(every as usize));
        next = (next + every as usize - column.len() % every as usize) % every as usize;
    }
    times.sort_unstable();
    Ok((times, every))
}

/// Returns the stretch of about `size` samples that starts at the `place`-th sample. `times` are those of every
/// `every`-th sample.
fn stretch(times: &[i64], every: u64, partition: usize, place: u64, size: u64) -> Option<Stretch> {
    let from = *times.get((place / every) as usize)?;
    let until = times.get((place + size).div_ceil(every) as usize).copied();
    // Samples with the same time cannot be separated.
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
    fn stretches_have_about_the_requested_number_of_samples() {
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
