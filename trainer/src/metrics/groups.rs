//! Collects the predictions of each group's samples, from anywhere in the data and from all ranks.
//!
//! ```text
//! batches ─▶ records by hash of the group, in memory, beyond a limit in a file ─▶ one part of all ranks at a time ─▶ sums
//! ```

use std::collections::BTreeMap;
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};

use super::{Ranking, RankingSums, Segment, Task};
use crate::Result;
use crate::distributed::Collectives;

/// The number of parts into which groups are divided by a hash. In the end, all samples of one part are in
/// memory at a time.
const PARTS: usize = 256;
/// The bytes of records that are kept in memory.
const MEMORY: usize = 256 << 20;

/// The scores and labels of samples by group, for ranking metrics.
#[derive(Debug)]
pub(crate) struct GroupedScores {
    /// The indices of the tasks without negative labels; other tasks have no ranking metrics.
    tasks: Vec<usize>,
    segments: usize,
    parts: Vec<Vec<u8>>,
    /// The number of bytes in `parts`.
    held: usize,
    limit: usize,
    spilled: Option<Spilled>,
    without_group: u64,
}

/// The records in a temporary file.
#[derive(Debug)]
struct Spilled {
    file: std::fs::File,
    end: u64,
    /// The offset and size in bytes of each piece of a part.
    pieces: Vec<Vec<(u64, usize)>>,
}

/// A sample of a group.
#[derive(Debug, Clone)]
struct Record {
    group: u64,
    /// The segment for each segmenting feature.
    segments: Vec<Segment>,
    /// The score and label for each task.
    scores: Vec<(f32, f32)>,
}

/// The ranking metrics by task: of all samples, and by feature and segment.
#[derive(Debug, Default)]
pub(crate) struct Rankings {
    pub(crate) all: BTreeMap<usize, Ranking>,
    /// The metrics by segment, in the order of the features.
    pub(crate) segments: Vec<BTreeMap<Segment, BTreeMap<usize, Ranking>>>,
}

impl GroupedScores {
    /// Creates an instance without samples. Every sample has `segments` segments, one per segmenting feature.
    pub(crate) fn new(tasks: &[Task], segments: usize) -> Self {
        Self::with_limit(tasks, segments, MEMORY)
    }

    fn with_limit(tasks: &[Task], segments: usize, limit: usize) -> Self {
        let ranked = tasks.iter().enumerate().filter(|(_, task)| task.loss.ranks());
        Self {
            tasks: ranked.map(|(number, _)| number).collect(),
            segments,
            parts: vec![Vec::new(); PARTS],
            held: 0,
            limit,
            spilled: None,
            without_group: 0,
        }
    }

    /// Adds a sample with its segments; `of_task` returns its score and label for a task.
    pub(crate) fn add(
        &mut self,
        group: Option<u64>,
        segments: impl Iterator<Item = Segment>,
        of_task: impl Fn(usize) -> (f32, f32),
    ) -> std::io::Result<()> {
        let Some(group) = group else {
            self.without_group += 1;
            return Ok(());
        };
        // Fibonacci hashing, because groups may be consecutive numbers.
        let part = &mut self.parts[(group.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as usize];
        let before = part.len();
        part.extend(group.to_le_bytes());
        segments.for_each(|segment| part.extend(segment.to_bytes()));
        for (score, label) in self.tasks.iter().map(|task| of_task(*task)) {
            part.extend(score.to_le_bytes());
            part.extend(label.to_le_bytes());
        }
        self.held += part.len() - before;
        if self.held > self.limit { self.spill() } else { Ok(()) }
    }

    fn spill(&mut self) -> std::io::Result<()> {
        let new = || {
            Ok::<_, std::io::Error>(Spilled {
                file: tempfile::tempfile()?,
                end: 0,
                pieces: vec![Vec::new(); PARTS],
            })
        };
        let mut spilled = self.spilled.take().map_or_else(new, Ok)?;
        for (part, pieces) in self.parts.iter_mut().zip(&mut spilled.pieces) {
            if !part.is_empty() {
                spilled.file.write_all(part)?;
                pieces.push((spilled.end, part.len()));
                spilled.end += part.len() as u64;
                part.clear();
            }
        }
        self.held = 0;
        self.spilled = Some(spilled);
        Ok(())
    }

    /// Returns all records of this rank in a part.
    fn take_part(&mut self, number: usize) -> std::io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        if let Some(Spilled { file, pieces, .. }) = &mut self.spilled {
            for (offset, length) in &pieces[number] {
                file.seek(SeekFrom::Start(*offset))?;
                let start = bytes.len();
                bytes.resize(start + length, 0);
                file.read_exact(&mut bytes[start..])?;
            }
        }
        bytes.append(&mut self.parts[number]);
        Ok(bytes)
    }

    /// Computes the metrics over the samples of all ranks; the result is the same on every rank. Every rank
    /// must call it. `kept` has the individual segments of each feature, ascending; all other samples belong to
    /// [`Segment::Other`].
    pub(crate) fn figures(
        mut self,
        top: &[usize],
        kept: &[Vec<Segment>],
        collectives: &dyn Collectives,
    ) -> Result<Rankings> {
        let mut sums = Sums::new(self.tasks.len(), top, kept);
        for number in 0..PARTS {
            let own = collectives.agree_on(|| self.take_part(number).map_err(crate::Error::from))?;
            let of_ranks = match collectives.size() {
                1 => vec![own],
                _ => collectives.gather_bytes(&own)?,
            };
            let width = 8 + self.segments * Segment::BYTES + 8 * self.tasks.len();
            let records = of_ranks.iter().flat_map(|bytes| bytes.chunks_exact(width));
            let records = records.map(|bytes| Record::read(bytes, self.segments));
            // The order of groups determines the order of summation.
            let mut records: Vec<Record> = records.collect();
            records.sort_by_key(|record| record.group);
            records.chunk_by(|a, b| a.group == b.group).for_each(|group| sums.add(group));
        }
        let without_group = collectives.sum(self.without_group)?;
        Ok(sums.figures(&self.tasks, without_group))
    }
}

impl Record {
    fn read(bytes: &[u8], segments: usize) -> Self {
        let (group, rest) = bytes.split_first_chunk().expect("a record begins with its group");
        let (of_segments, scores) = rest.split_at(segments * Segment::BYTES);
        let number = |bytes: &[u8], place: usize| {
            f32::from_le_bytes(bytes[4 * place..4 * place + 4].try_into().expect("four bytes"))
        };
        Self {
            group: u64::from_le_bytes(*group),
            segments: of_segments.as_chunks().0.iter().map(Segment::from_bytes).collect(),
            scores: scores.chunks_exact(8).map(|bytes| (number(bytes, 0), number(bytes, 1))).collect(),
        }
    }
}

/// Sums by task, over all samples and by segment.
struct Sums<'a> {
    none: Vec<RankingSums>,
    /// The individual segments by feature, ascending.
    kept: &'a [Vec<Segment>],
    all: Vec<RankingSums>,
    segments: Vec<BTreeMap<Segment, Vec<RankingSums>>>,
}

impl<'a> Sums<'a> {
    fn new(tasks: usize, top: &[usize], kept: &'a [Vec<Segment>]) -> Self {
        let none = vec![RankingSums::new(top); tasks];
        Self { all: none.clone(), none, kept, segments: vec![BTreeMap::new(); kept.len()] }
    }

    /// Adds the samples of a group.
    fn add(&mut self, group: &[Record]) {
        let add = |sums: &mut Vec<RankingSums>, records: &mut dyn Iterator<Item = &Record>| {
            let records: Vec<&Record> = records.collect();
            for (task, sums) in sums.iter_mut().enumerate() {
                sums.add(&mut records.iter().map(|record| record.scores[task]).collect::<Vec<_>>());
            }
        };
        add(&mut self.all, &mut group.iter());
        for (feature, segments) in self.segments.iter_mut().enumerate() {
            let of = |record: &Record| {
                let own = record.segments[feature];
                if self.kept[feature].binary_search(&own).is_ok() { own } else { Segment::Other }
            };
            let mut found: Vec<Segment> = group.iter().map(of).collect();
            found.sort_unstable();
            found.dedup();
            for segment in found {
                let sums = segments.entry(segment).or_insert_with(|| self.none.clone());
                add(sums, &mut group.iter().filter(|record| of(record) == segment));
            }
        }
    }

    fn figures(self, tasks: &[usize], without_group: u64) -> Rankings {
        let by_task = |sums: &[RankingSums], without_group| {
            let figures = sums.iter().map(|sums| sums.figures(without_group));
            tasks.iter().copied().zip(figures).collect()
        };
        let of_segments = |segments: BTreeMap<Segment, Vec<RankingSums>>| {
            segments.into_iter().map(|(segment, sums)| (segment, by_task(&sums, 0))).collect()
        };
        Rankings {
            all: by_task(&self.all, without_group),
            segments: self.segments.into_iter().map(of_segments).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::distributed::{Alone, threads};
    use crate::metrics::Loss;

    const SAMPLES: u64 = 2_000;

    fn tasks() -> [Task; 3] {
        let task = |name: &str, column, loss| Task { name: name.into(), column, loss };
        [task("clicked", 0, Loss::Bce), task("price", 1, Loss::Mse), task("count", 2, Loss::Poisson)]
    }

    /// Returns the score and label for a task.
    fn sample(number: u64, task: usize) -> (f32, f32) {
        let mixed = (number + 1).wrapping_mul(0x2545_F491_4F6C_DD1D) >> (8 * (task + 1));
        (f32::from((mixed % 7) as u8), f32::from(u8::from(mixed.is_multiple_of(5))))
    }

    /// Returns the group of a sample. The samples of a group are far apart; every eleventh sample has no group.
    fn group(number: u64) -> Option<u64> {
        (!number.is_multiple_of(11)).then_some(number % 300)
    }

    fn segment(number: u64) -> Segment {
        Segment::Id((number % 4) as i64)
    }

    /// Collects every `of`th sample, starting with `first`.
    fn collected(first: u64, of: usize, limit: usize) -> GroupedScores {
        let mut scores = GroupedScores::with_limit(&tasks(), 1, limit);
        for number in (first..SAMPLES).step_by(of) {
            let segments = std::iter::once(segment(number));
            scores.add(group(number), segments, |task| sample(number, task)).unwrap();
        }
        scores
    }

    fn figures(scores: GroupedScores, collectives: &dyn Collectives) -> Rankings {
        let kept = [vec![Segment::Id(0), Segment::Id(1), Segment::Other]];
        scores.figures(&[1, 3], &kept, collectives).unwrap()
    }

    #[test]
    fn every_group_is_whole_wherever_its_samples_are() {
        let found = figures(collected(0, 1, usize::MAX), &Alone);
        let naive = |task: usize, keep: &dyn Fn(u64) -> bool| {
            let mut sums = RankingSums::new(&[1, 3]);
            for group_number in 0..300 {
                let own = (0..SAMPLES).filter(|n| group(*n) == Some(group_number) && keep(*n));
                let mut own: Vec<_> = own.map(|n| sample(n, task)).collect();
                if !own.is_empty() {
                    sums.add(&mut own);
                }
            }
            sums.figures(0)
        };
        // The second task has labels that may be negative, so it has no ranking metrics.
        assert_eq!(found.all.keys().collect::<Vec<_>>(), [&0, &2]);
        for (task, ranking) in &found.all {
            let expected = naive(*task, &|_| true);
            assert_eq!(
                (ranking.groups, ranking.samples_without_group),
                (expected.groups, SAMPLES.div_ceil(11))
            );
            close(ranking, &expected);
        }
        let by_segment = &found.segments[0];
        assert_eq!(by_segment.len(), 3);
        close(&by_segment[&Segment::Id(1)][&0], &naive(0, &|n| n % 4 == 1));
        close(&by_segment[&Segment::Other][&2], &naive(2, &|n| n % 4 > 1));
    }

    #[track_caller]
    fn close(found: &Ranking, expected: &Ranking) {
        assert_eq!(found.figures.len(), expected.figures.len());
        for (name, value) in &found.figures {
            assert!((value - expected.figures[name]).abs() < 1e-12, "{name}: {found:?}, {expected:?}");
        }
    }

    #[test]
    fn neither_spilling_nor_ranks_change_a_bit() {
        let whole = figures(collected(0, 1, usize::MAX), &Alone);
        let spilled = collected(0, 1, 1_000);
        assert!(spilled.spilled.is_some());
        assert_eq!(figures(spilled, &Alone).all, whole.all);
        let ranks = threads(3, Duration::from_secs(300)).into_iter().map(|collectives| {
            std::thread::spawn(move || {
                figures(collected(u64::from(collectives.rank()), 3, 700), &collectives)
            })
        });
        let ranks: Vec<_> = ranks.collect();
        let on_ranks = ranks.into_iter().map(|rank| rank.join().unwrap());
        for of_rank in on_ranks {
            assert_eq!((&of_rank.all, &of_rank.segments), (&whole.all, &whole.segments));
        }
    }
}
