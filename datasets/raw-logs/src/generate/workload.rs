//! The three workloads as data: the number, kind, groups and names of their features.

use std::ops::Range;

use serde::Serialize;

/// A workload of the benchmarks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Workload {
    /// 24 pooled user features, 6 sequences of 100, 12 item features; 16.5 samples per session
    Rm1,
    /// 45 pooled user features, 15 item features; 16.5 samples per session
    Rm2,
    /// 13 pooled user features, 13 item features; 8 samples per session
    Rm3,
}

/// The rows of every embedding table: ids are in `0..TABLE_ROWS`.
pub(super) const TABLE_ROWS: u32 = 200_000;
/// The dimension of every embedding table.
pub(super) const TABLE_DIM: u32 = 64;
/// The number of dense features.
pub(super) const DENSE_FEATURES: usize = 13;
/// The most pooled user features that change together.
const LARGEST_USER_GROUP: usize = 6;
/// The sequences that share one timeline: an event appends one id to each.
const SEQUENCES_PER_TIMELINE: usize = 3;

/// The numbers of a workload.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    /// Mean of the geometric session size.
    pub(super) session_size: f64,
    /// Pooled user features.
    pub(super) user_features: usize,
    /// Mean list length of a pooled user feature.
    pub(super) user_length: usize,
    /// The probability that a pooled user feature repeats from the previous sample of the session.
    pub(super) repeat: f64,
    /// Sequence features.
    pub(super) sequences: usize,
    /// Length of every sequence.
    pub(super) window: usize,
    /// The probability that a timeline has a new item in the next sample of the session.
    pub(super) append: f64,
    /// Item features, drawn for every sample.
    pub(super) item_features: usize,
    /// Mean list length of an item feature.
    pub(super) item_length: usize,
}

/// How the lists of a group change from one sample of a session to the next.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Change {
    /// All lists of the group stay with probability `repeat`, or else all are drawn anew.
    Redraw {
        /// The probability that the lists stay.
        repeat: f64,
    },
    /// With probability `append` every list gets one new id at its end and loses its first.
    Slide {
        /// The probability of a new id.
        append: f64,
    },
    /// Every sample has lists of its own.
    Fresh,
}

/// Features that change together.
#[derive(Debug, Clone)]
pub(super) struct GroupSpec {
    /// The feature group in `dataset.toml`; `None` where nothing repeats.
    pub(super) name: Option<String>,
    /// How they change.
    pub(super) change: Change,
    /// The mean list length of each; for a timeline, the constant length.
    pub(super) length: usize,
    /// The columns.
    pub(super) features: Vec<String>,
}

impl Workload {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Rm1 => "rm1",
            Self::Rm2 => "rm2",
            Self::Rm3 => "rm3",
        }
    }

    pub(super) fn shape(self) -> Shape {
        let none = Shape {
            session_size: 16.5,
            user_features: 0,
            user_length: 0,
            repeat: 0.0,
            sequences: 0,
            window: 0,
            append: 0.0,
            item_features: 0,
            item_length: 0,
        };
        match self {
            Self::Rm1 => Shape {
                user_features: 24,
                user_length: 20,
                repeat: 0.9,
                sequences: 6,
                window: 100,
                append: 0.3,
                item_features: 12,
                item_length: 2,
                ..none
            },
            Self::Rm2 => Shape {
                user_features: 45,
                user_length: 10,
                repeat: 0.8,
                item_features: 15,
                item_length: 10,
                ..none
            },
            Self::Rm3 => Shape {
                session_size: 8.0,
                user_features: 13,
                user_length: 4,
                repeat: 0.7,
                item_features: 13,
                item_length: 4,
                ..none
            },
        }
    }

    /// The groups in column order: pooled user features, timelines, item features.
    pub(super) fn groups(self) -> Vec<GroupSpec> {
        let shape = self.shape();
        let mut groups = Vec::new();
        for (index, range) in even_ranges(shape.user_features, LARGEST_USER_GROUP).enumerate() {
            groups.push(GroupSpec {
                name: Some(format!("user_{}", letter(index))),
                change: Change::Redraw { repeat: shape.repeat },
                length: shape.user_length,
                features: numbered("user", range),
            });
        }
        for (index, range) in even_ranges(shape.sequences, SEQUENCES_PER_TIMELINE).enumerate() {
            groups.push(GroupSpec {
                name: Some(format!("timeline_{}", letter(index))),
                change: Change::Slide { append: shape.append },
                length: shape.window,
                features: numbered("sequence", range),
            });
        }
        groups.push(GroupSpec {
            name: None,
            change: Change::Fresh,
            length: shape.item_length,
            features: numbered("item", 0..shape.item_features),
        });
        groups
    }
}

/// The names of the dense features.
pub(super) fn dense_names() -> Vec<String> {
    numbered("dense", 0..DENSE_FEATURES)
}

fn numbered(prefix: &str, range: Range<usize>) -> Vec<String> {
    range.map(|number| format!("{prefix}_{number:02}")).collect()
}

/// `a` for 0, `b` for 1; no workload has more groups of a kind than letters.
fn letter(index: usize) -> char {
    ('a'..='z').nth(index).unwrap_or('z')
}

/// Splits `0..count` into as few ranges of at most `largest` as possible, which differ by at most one.
fn even_ranges(count: usize, largest: usize) -> impl Iterator<Item = Range<usize>> {
    let ranges = count.div_ceil(largest);
    (0..ranges).map(move |index| count * index / ranges..count * (index + 1) / ranges)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_feature_is_in_one_group_under_a_name_of_its_own() {
        let expected = [(Workload::Rm1, 24 + 6 + 12), (Workload::Rm2, 45 + 15), (Workload::Rm3, 13 + 13)];
        for (workload, count) in expected {
            let groups = workload.groups();
            let features: Vec<&String> = groups.iter().flat_map(|group| &group.features).collect();
            assert_eq!(features.len(), count);
            assert_eq!(features.iter().collect::<HashSet<_>>().len(), count);
            let names: HashSet<_> = groups.iter().map(|group| &group.name).collect();
            assert_eq!(names.len(), groups.len());
            assert!(groups.iter().all(|group| group.name.is_none() || group.features.len() <= 6));
        }
    }

    #[test]
    fn ranges_are_even() {
        assert_eq!(even_ranges(13, 6).collect::<Vec<_>>(), [0..4, 4..8, 8..13]);
        assert_eq!(even_ranges(6, 3).collect::<Vec<_>>(), [0..3, 3..6]);
        assert_eq!(even_ranges(0, 3).count(), 0);
    }
}
