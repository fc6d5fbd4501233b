//! The exact AUC of evaluations that are small enough to keep every score.

use super::area::Area;
use super::{Figures, Loss, Task};
use crate::Result;
use crate::distributed::Collectives;

/// The maximum number of samples, over all ranks, for which every score is kept: 48 MiB per task.
const MOST: usize = 4 << 20;

/// The scores, labels and weights of binary tasks, up to a maximum number of samples.
#[derive(Debug)]
pub(crate) struct ExactScores {
    /// The indices of the binary tasks.
    tasks: Vec<usize>,
    /// The score, label and weight of every sample, by binary task; `None` once there are too many.
    samples: Option<Vec<Vec<[f32; 3]>>>,
    most: usize,
}

impl ExactScores {
    /// Creates an instance without samples.
    pub(crate) fn new(tasks: &[Task]) -> Self {
        let binary = tasks.iter().enumerate().filter(|(_, task)| task.loss == Loss::Bce);
        let tasks: Vec<usize> = binary.map(|(number, _)| number).collect();
        Self { samples: Some(vec![Vec::new(); tasks.len()]), tasks, most: MOST }
    }

    /// Adds a sample; `of_task` returns its score, label and weight for a task.
    pub(crate) fn add(&mut self, of_task: impl Fn(usize) -> [f32; 3]) {
        let Some(samples) = &mut self.samples else { return };
        for (own, task) in samples.iter_mut().zip(&self.tasks) {
            own.push(of_task(*task));
        }
        if samples.first().is_some_and(|own| own.len() > self.most) {
            self.samples = None;
        }
    }

    /// Replaces the AUC of all tasks in `figures` by the exact AUC over all ranks, unless there are too many
    /// samples. Every rank must call it.
    pub(crate) fn refine(self, figures: &mut [(&str, Figures)], collectives: &dyn Collectives) -> Result<()> {
        let length = self.samples.as_ref().map(|samples| samples.first().map_or(0, Vec::len));
        let counts: Vec<Option<usize>> = match collectives.size() {
            1 => vec![length],
            _ => collectives.gather_json(&length)?,
        };
        let all = counts.into_iter().sum::<Option<usize>>().filter(|all| *all <= self.most);
        let (Some(_), Some(samples)) = (all, self.samples) else { return Ok(()) };
        for (task, own) in self.tasks.into_iter().zip(samples) {
            let mut samples = match collectives.size() {
                1 => own,
                _ => {
                    let of_ranks = collectives.gather_bytes(bytemuck::cast_slice(&own))?;
                    let samples = of_ranks.iter().flat_map(|bytes| bytes.chunks_exact(size_of::<[f32; 3]>()));
                    // The bytes may be unaligned.
                    samples.map(bytemuck::pod_read_unaligned).collect()
                }
            };
            if let Some(auc) = auc(&mut samples) {
                (figures[task].1.auc, figures[task].1.auc_error) = (Some(auc), Some(0.0));
            }
        }
        Ok(())
    }
}

/// Returns the weighted fraction of pairs of a positive and a negative sample in which the positive one has the
/// higher score, with ties counting half. Each sample is a score, a label and a weight.
fn auc(samples: &mut [[f32; 3]]) -> Option<f64> {
    // Equal scores have a fixed order, so that the sums do not depend on the number of ranks.
    let key = |sample: &[f32; 3]| sample.map(f32::to_bits);
    samples.sort_by(|a, b| a[0].total_cmp(&b[0]).then_with(|| key(a).cmp(&key(b))));
    let weights = |tie: &[[f32; 3]]| {
        tie.iter().fold([0.0, 0.0], |[negative, positive], [_, label, weight]| {
            let (label, weight) = (f64::from(*label), f64::from(*weight));
            [negative + (1.0 - label) * weight, positive + label * weight]
        })
    };
    let Area { negative, positive, won, .. } = Area::of(samples.chunk_by(|a, b| a[0] == b[0]).map(weights));
    (positive > 0.0 && negative > 0.0).then(|| won / (positive * negative))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::distributed::{Alone, threads};

    fn sample(number: u32) -> [f32; 3] {
        let mixed = number.wrapping_mul(2_654_435_761) >> 8;
        // The scores are so close together that bucketed logits would merge them.
        [1.0 + (mixed % 50) as f32 * 1e-6, mixed.is_multiple_of(3).into(), 1.0 + (number % 2) as f32]
    }

    fn collected(rank: u32, of: usize, most: usize) -> ExactScores {
        let task = |name: &str, loss| Task { name: name.into(), column: 0, loss };
        let tasks = [task("seconds", Loss::Mse), task("clicked", Loss::Bce)];
        let mut scores = ExactScores { most, ..ExactScores::new(&tasks) };
        for number in (rank..300).step_by(of) {
            scores.add(|task| if task == 1 { sample(number) } else { [f32::NAN; 3] });
        }
        scores
    }

    fn refined(scores: ExactScores, collectives: &dyn Collectives) -> [Option<f64>; 2] {
        let mut figures = [("seconds", Figures::default()), ("clicked", Figures::default())];
        scores.refine(&mut figures, collectives).unwrap();
        figures.map(|(_, figures)| figures.auc)
    }

    #[test]
    fn auc_is_that_of_all_pairs_on_any_number_of_ranks() {
        let (mut won, mut pairs) = (0.0, 0.0);
        for [a, positive, weight] in (0..300).map(sample) {
            for [b, other, of_other] in (0..300).map(sample).filter(|_| positive == 1.0) {
                let weight = f64::from(weight * of_other * (1.0 - other));
                won += weight * if a > b { 1.0 } else { f64::from(u8::from(a == b)) / 2.0 };
                pairs += weight;
            }
        }
        let [none, found] = refined(collected(0, 1, 300), &Alone);
        assert_eq!(none, None);
        assert!((found.unwrap() - won / pairs).abs() < 1e-12);
        let on_ranks = |most| {
            let ranks = threads(3, Duration::from_secs(300)).into_iter();
            let ranks = ranks
                .map(|rank| std::thread::spawn(move || refined(collected(rank.rank(), 3, most), &rank)[1]));
            ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(on_ranks(300), [found; 3]);
        // There are too many samples on one rank, or on all ranks together.
        assert_eq!(refined(collected(0, 1, 299), &Alone)[1], None);
        assert_eq!(on_ranks(299), [None; 3]);
    }

    #[test]
    fn one_class_has_no_auc() {
        assert_eq!(auc(&mut [[0.5, 1.0, 1.0], [0.1, 1.0, 1.0]]), None);
        assert_eq!(auc(&mut []), None);
    }
}
