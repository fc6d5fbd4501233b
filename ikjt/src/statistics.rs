//! How much deduplication saves: measured, and predicted from how often lists repeat.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::{Batch, Error, Feature, Group, Result};

/// Figures of one or several batches, by group and by feature.
///
/// ```
/// use onefold_ikjt::{Batch, BatchParts, Feature, Group, Statistics, deduplicate};
///
/// let user = Feature::from_rows("user", &[[7], [7], [8], [8]])?;
/// let batch = Batch::try_new(BatchParts {
///     size: 4,
///     dense: vec![].into(),
///     labels: vec![].into(),
///     weights: None,
///     timestamps: None,
///     kept: Vec::new(),
///     groups: vec![deduplicate(&Group::try_new("user", None, vec![user])?)],
/// })?;
/// let mut statistics = Statistics::default();
/// statistics.add(&batch, Some(&[1, 1, 2, 2]))?;
/// let user = &statistics.groups()["user"].figures;
/// assert_eq!(user.dedupe_factor(), 2.0);
/// assert_eq!(user.samples_per_session(), Some(2.0));
/// assert_eq!(user.repeat_probability(), Some(1.0));
/// assert_eq!(user.predicted_dedupe_factor(), Some(2.0));
/// # Ok::<(), onefold_ikjt::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Statistics {
    groups: BTreeMap<String, GroupStatistics>,
}

/// Figures of one group, whose features are counted together, and of its features.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct GroupStatistics {
    /// All features together: a sample's lists repeat if those of every feature do.
    #[serde(flatten)]
    pub figures: Figures,
    /// By feature.
    pub features: BTreeMap<String, Figures>,
}

/// What was counted. The factors follow from it, and stand beside it when it is serialised.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(into = "Report")]
pub struct Figures {
    /// Samples.
    pub samples: u64,
    /// Distinct rows, or samples where nothing was deduplicated.
    pub rows: u64,
    /// Ids of all samples, as if every sample carried its lists.
    pub sample_values: u64,
    /// Ids of all rows, as if every row carried its lists.
    pub row_values: u64,
    /// Ids that are stored: those that windows share with the row before count once.
    pub stored_values: u64,
    /// Samples of which the session is known.
    pub session_samples: u64,
    /// Sessions. One that several batches have a part of counts in each of them, as it is deduplicated there.
    pub sessions: u64,
    /// Samples whose lists equal those of the sample before, in the same session and batch.
    pub repeats: u64,
}

impl Figures {
    /// Samples' ids per id of the distinct rows: what exact deduplication saves. 1 if there are no ids.
    pub fn dedupe_factor(&self) -> f64 {
        ratio(self.sample_values, self.row_values).unwrap_or(1.0)
    }

    /// Samples' ids per id stored: what windows save on top of it. 1 if there are no ids.
    pub fn partial_dedupe_factor(&self) -> f64 {
        ratio(self.sample_values, self.stored_values).unwrap_or(1.0)
    }

    /// S, the mean number of samples per session and batch, if sessions are known.
    pub fn samples_per_session(&self) -> Option<f64> {
        ratio(self.session_samples, self.sessions)
    }

    /// d, the probability that lists repeat from the previous sample of the session, if any sample has one.
    pub fn repeat_probability(&self) -> Option<f64> {
        ratio(self.repeats, self.session_samples.saturating_sub(self.sessions))
    }

    /// The dedupe factor to expect, `1 / (1 - d (S-1)/S)`, if sessions are known.
    ///
    /// The measured factor is higher where rows repeat that are not neighbours, and differs where long lists repeat
    /// more or less often than short ones.
    pub fn predicted_dedupe_factor(&self) -> Option<f64> {
        let s = self.samples_per_session()?;
        let d = self.repeat_probability().unwrap_or(0.0);
        Some(1.0 / (1.0 - d * (s - 1.0) / s))
    }

    fn add(&mut self, other: &Self) {
        self.samples += other.samples;
        self.rows += other.rows;
        self.sample_values += other.sample_values;
        self.row_values += other.row_values;
        self.stored_values += other.stored_values;
        self.session_samples += other.session_samples;
        self.sessions += other.sessions;
        self.repeats += other.repeats;
    }
}

fn ratio(a: u64, b: u64) -> Option<f64> {
    (b > 0).then(|| a as f64 / b as f64)
}

/// [`Figures`] as people and programs read them.
#[derive(Serialize)]
struct Report {
    samples: u64,
    rows: u64,
    sample_values: u64,
    row_values: u64,
    stored_values: u64,
    dedupe_factor: f64,
    partial_dedupe_factor: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    sessions: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    samples_per_session: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    repeat_probability: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    predicted_dedupe_factor: Option<f64>,
}

impl From<Figures> for Report {
    fn from(figures: Figures) -> Self {
        Self {
            samples: figures.samples,
            rows: figures.rows,
            sample_values: figures.sample_values,
            row_values: figures.row_values,
            stored_values: figures.stored_values,
            dedupe_factor: figures.dedupe_factor(),
            partial_dedupe_factor: figures.partial_dedupe_factor(),
            sessions: (figures.sessions > 0).then_some(figures.sessions),
            samples_per_session: figures.samples_per_session(),
            repeat_probability: figures.repeat_probability(),
            predicted_dedupe_factor: figures.predicted_dedupe_factor(),
        }
    }
}

impl Statistics {
    /// Counts a batch. `sessions` gives every sample's session, for what is predicted: neighbours with the same id
    /// are of one session. Finding repeats compares neighbours' lists, and costs as much as deduplicating does.
    ///
    /// # Errors
    ///
    /// [`Error::Invariant`] if there are not as many session ids as samples; nothing is counted then.
    pub fn add(&mut self, batch: &Batch, sessions: Option<&[i64]>) -> Result<()> {
        if let Some(sessions) = sessions.filter(|sessions| sessions.len() != batch.size()) {
            let message = format!("{} session ids for {} samples", sessions.len(), batch.size());
            return Err(Error::invariant("statistics", message));
        }
        for group in batch.groups() {
            let statistics = self.groups.entry(group.name().to_owned()).or_default();
            statistics.add(group, sessions);
        }
        Ok(())
    }

    /// By group.
    pub fn groups(&self) -> &BTreeMap<String, GroupStatistics> {
        &self.groups
    }
}

impl GroupStatistics {
    fn add(&mut self, group: &Group, sessions: Option<&[i64]>) {
        // The samples after another one of their session, and whether all features repeat there.
        let later: Vec<usize> = sessions.map_or_else(Vec::new, |sessions| {
            (1..sessions.len()).filter(|&i| sessions[i] == sessions[i - 1]).collect()
        });
        let mut all_repeat = vec![true; later.len()];
        let known = sessions.map_or(0, <[i64]>::len) as u64;
        let counted = Figures {
            samples: group.samples() as u64,
            rows: group.rows() as u64,
            session_samples: known,
            sessions: known - later.len() as u64,
            ..Figures::default()
        };
        let mut together = counted;
        for feature in group.features() {
            let mut figures = Figures {
                sample_values: group.sample_values_of(feature),
                row_values: feature.total_size(),
                stored_values: stored_values(feature),
                ..counted
            };
            for (&sample, all_repeat) in later.iter().zip(&mut all_repeat) {
                let (before, row) = (group.row_of(sample - 1), group.row_of(sample));
                let repeats = before == row || feature.has_equal_rows(before, row);
                figures.repeats += u64::from(repeats);
                *all_repeat &= repeats;
            }
            self.features.entry(feature.name().to_owned()).or_default().add(&figures);
            together.sample_values += figures.sample_values;
            together.row_values += figures.row_values;
            together.stored_values += figures.stored_values;
        }
        together.repeats = all_repeat.into_iter().map(u64::from).sum();
        self.figures.add(&together);
    }
}

/// The values that rows take if each shares with the row before what the buffers let it share.
fn stored_values(feature: &Feature) -> u64 {
    let (mut segment, mut stored) = (0..0, 0);
    for span in (0..feature.rows()).map(|row| feature.span(row)).filter(|span| !span.is_empty()) {
        if span.start < segment.start || span.start > segment.end {
            segment = span.start..span.start;
        }
        stored += span.end.saturating_sub(segment.end) as u64;
        segment.end = segment.end.max(span.end);
    }
    // Rows that share values with rows farther away are counted more than once.
    stored.min(feature.values().len() as u64)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;
    use crate::arbitrary::{List, batches, lists};
    use crate::{BatchParts, deduplicate, fold_windows};

    fn statistics(batch: &Batch, sessions: Option<&[i64]>) -> Statistics {
        let mut statistics = Statistics::default();
        statistics.add(batch, sessions).unwrap();
        statistics
    }

    fn batch(groups: Vec<Group>) -> Batch {
        let (dense, labels) = (vec![].into(), vec![].into());
        let size = groups[0].samples();
        Batch::try_new(BatchParts {
            size,
            dense,
            labels,
            weights: None,
            timestamps: None,
            kept: Vec::new(),
            groups,
        })
        .unwrap()
    }

    proptest! {
        #[test]
        fn counts_equal_those_of_the_samples(
            found in batches(),
            steps in prop::collection::vec(0_i64..2, 12),
        ) {
            let found = batch(found.groups().iter().map(deduplicate).collect());
            let sessions: Vec<i64> = steps.iter()
                .scan(0, |session, step| { *session += step; Some(*session) })
                .take(found.size())
                .collect();
            let counted = statistics(&found, Some(&sessions));
            for group in found.groups() {
                let samples: Vec<Vec<List>> = lists(group);
                let figures = counted.groups()[group.name()].figures;
                let ids = |samples: &mut dyn Iterator<Item = &Vec<List>>| -> u64 {
                    samples.flatten().map(|list| list.len() as u64).sum()
                };
                let distinct: BTreeSet<_> = samples.iter().collect();
                prop_assert_eq!(figures.rows, distinct.len() as u64);
                prop_assert_eq!(figures.sample_values, ids(&mut samples.iter()));
                prop_assert_eq!(figures.row_values, ids(&mut distinct.into_iter()));
                prop_assert_eq!(figures.sessions, sessions.iter().collect::<BTreeSet<_>>().len() as u64);
                let repeats = |same: &dyn Fn(&Vec<List>, &Vec<List>) -> bool| {
                    let later = (1..samples.len()).filter(|&i| sessions[i] == sessions[i - 1]);
                    later.filter(|&i| same(&samples[i - 1], &samples[i])).count() as u64
                };
                prop_assert_eq!(figures.repeats, repeats(&|a, b| a == b));
                for (f, feature) in group.features().iter().enumerate() {
                    let figures = counted.groups()[group.name()].features[feature.name()];
                    prop_assert_eq!(figures.repeats, repeats(&|a, b| a[f] == b[f]));
                    prop_assert_eq!(figures.row_values, feature.total_size());
                }
            }
        }

        #[test]
        fn batches_add_up(found in batches()) {
            let sessions = vec![0; found.size()];
            let mut twice = statistics(&found, Some(&sessions));
            twice.add(&found, Some(&sessions)).unwrap();
            for (name, once) in statistics(&found, Some(&sessions)).groups() {
                let (once, twice) = (once.figures, twice.groups()[name].figures);
                prop_assert_eq!(twice.stored_values, 2 * once.stored_values);
                prop_assert_eq!(twice.sessions, 2 * once.sessions);
                prop_assert_eq!(twice.dedupe_factor(), once.dedupe_factor());
            }
        }
    }

    #[test]
    fn windows_raise_the_partial_factor_only() {
        let rows: Vec<Vec<i64>> = (0..10).map(|i| (i / 2..i / 2 + 8).collect()).collect();
        let group = Group::try_new("g", None, vec![Feature::from_rows("w", &rows).unwrap()]).unwrap();
        let exact = deduplicate(&group);
        let partial = fold_windows(&exact);
        let figures = |group: &Group| statistics(&batch(vec![group.clone()]), None).groups()["g"].figures;
        assert_eq!((figures(&group).dedupe_factor(), figures(&group).partial_dedupe_factor()), (1.0, 1.0));
        assert_eq!((figures(&exact).dedupe_factor(), figures(&exact).partial_dedupe_factor()), (2.0, 2.0));
        assert_eq!(figures(&partial).dedupe_factor(), 2.0);
        assert_eq!(figures(&partial).partial_dedupe_factor(), 80.0 / 12.0);
    }

    #[test]
    fn stored_are_the_values_that_rows_use() {
        // Of twenty values: five for a window with a row within it, and two that no window reaches.
        let (offsets, sizes) = (vec![0, 1, 2, 10], vec![4, 1, 3, 2]);
        let feature = Feature::try_new("x", vec![0; 20], None, offsets, sizes).unwrap();
        assert_eq!(stored_values(&feature), 5 + 2);
    }

    #[test]
    fn the_prediction_is_recds() {
        // Two sessions of five; of eight samples that have one before them, six repeat it.
        let ids = [1, 1, 1, 2, 2, 3, 3, 3, 3, 4].map(|id| [id]);
        let group = Group::try_new("g", None, vec![Feature::from_rows("x", &ids).unwrap()]).unwrap();
        let sessions = [1, 1, 1, 1, 1, 2, 2, 2, 2, 2];
        let counted = statistics(&batch(vec![deduplicate(&group)]), Some(&sessions));
        let json = serde_json::to_value(&counted).unwrap();
        assert_eq!(json["g"]["samples_per_session"], 5.0);
        assert_eq!(json["g"]["repeat_probability"], 0.75);
        assert_eq!(json["g"]["dedupe_factor"], 2.5);
        let predicted = json["g"]["predicted_dedupe_factor"].as_f64().unwrap();
        assert!((predicted - 1.0 / (1.0 - 0.75 * 4.0 / 5.0)).abs() < 1e-12);
        assert_eq!(json["g"]["features"]["x"]["rows"], 4);
        assert_eq!(
            statistics(&batch(vec![group]), None).groups()["g"].figures.predicted_dedupe_factor(),
            None
        );
    }

    #[test]
    fn session_ids_must_fit() {
        let group = Group::try_new("g", None, vec![Feature::from_rows("x", &[[1]]).unwrap()]).unwrap();
        let mut statistics = Statistics::default();
        let refused = statistics.add(&batch(vec![group]), Some(&[])).unwrap_err().to_string();
        assert_eq!(refused, "statistics: 0 session ids for 1 samples");
    }
}
