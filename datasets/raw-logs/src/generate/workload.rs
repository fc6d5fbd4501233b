//! The three workloads: the number, kind, groups and names of their features.

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

/// The number of rows of every embedding table: ids are in `0..TABLE_ROWS`.
pub(super) const TABLE_ROWS: u32 = 200_000;
/// The dimension of every embedding table.
pub(super) const TABLE_DIM: u32 = 64;
/// The number of dense features.
pub(super) const DENSE_FEATURES: usize = 13;
/// The largest number of pooled user features that change together.
const LARGEST_USER_GROUP: usize = 6;
/// The number of sequences that share one timeline. An event appends one id to each of them.
const SEQUENCES_PER_TIMELINE: usize = 3;
/// The length of every sequence.
const WINDOW: usize = 100;
/// The probability that a timeline gets a new item in the next sample of the session.
const APPEND: f64 = 0.3;

/// How the lists of a group change from one sample of a session to the next.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Change {
    /// All lists of the group are kept with probability `repeat`, or else all are drawn again.
    Redraw {
        /// The probability that the lists are kept.
        repeat: f64,
    },
    /// With probability `append`, every list gets a new id at its end and loses its first one.
    Slide {
        /// The probability of a new id.
        append: f64,
    },
    /// Every sample has new lists.
    Fresh,
}

/// Features that change together.
#[derive(Debug, Clone)]
pub(super) struct GroupSpec {
    /// The feature group in `dataset.toml`, or `None` if lists do not repeat.
    pub(super) name: Option<String>,
    /// How the lists change.
    pub(super) change: Change,
    /// The mean list length of each feature. For a timeline, the constant length.
    pub(super) length: usize,
    /// The columns of the group.
    pub(super) features: Vec<String>,
}

impl Workload {
    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Rm1 => "rm1",
            Self::Rm2 => "rm2",
            Self::Rm3 => "rm3",
        }
    }

    /// Returns the mean of the geometric session size.
    pub(super) fn session_size(self) -> f64 {
        match self {
            Self::Rm1 | Self::Rm2 => 16.5,
            Self::Rm3 => 8.0,
        }
    }

    /// Returns the groups in column order: pooled user features, timelines, item features.
    pub(super) fn groups(self) -> Vec<GroupSpec> {
        // The number of pooled user features, their mean length and the probability that they repeat from the
        // previous sample of the session; the number of sequences; and the number of item features, which are drawn
        // for every sample, with their mean length.
        let (users, user_length, repeat, sequences, items, item_length) = match self {
            Self::Rm1 => (24, 20, 0.9, 6, 12, 2),
            Self::Rm2 => (45, 10, 0.8, 0, 15, 10),
            Self::Rm3 => (13, 4, 0.7, 0, 13, 4),
        };
        let change = Change::Redraw { repeat };
        let users = groups(["user", "user"], even_ranges(users, LARGEST_USER_GROUP), change, user_length);
        let sequences = even_ranges(sequences, SEQUENCES_PER_TIMELINE);
        let timelines = groups(["timeline", "sequence"], sequences, Change::Slide { append: APPEND }, WINDOW);
        let features = numbered("item", 0..items);
        let items = GroupSpec { name: None, change: Change::Fresh, length: item_length, features };
        users.chain(timelines).chain([items]).collect()
    }
}

/// Returns groups of one kind. The first argument is the prefix of the groups' names and of their features' names.
fn groups(
    [group, feature]: [&'static str; 2],
    ranges: impl Iterator<Item = Range<usize>>,
    change: Change,
    length: usize,
) -> impl Iterator<Item = GroupSpec> {
    ranges.enumerate().map(move |(index, range)| GroupSpec {
        name: Some(format!("{group}_{}", letter(index))),
        change,
        length,
        features: numbered(feature, range),
    })
}

/// Returns the names of the dense features.
pub(super) fn dense_names() -> Vec<String> {
    numbered("dense", 0..DENSE_FEATURES)
}

fn numbered(prefix: &str, range: Range<usize>) -> Vec<String> {
    range.map(|number| format!("{prefix}_{number:02}")).collect()
}

/// Returns `a` for 0 and `b` for 1. No workload has more groups of a kind than there are letters.
fn letter(index: usize) -> char {
    ('a'..='z').nth(index).unwrap_or('z')
}

/// Splits `0..count` into as few ranges of at most `largest` as possible. Their lengths differ by at most one.
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
    fn ranges_have_nearly_equal_lengths() {
        assert_eq!(even_ranges(13, 6).collect::<Vec<_>>(), [0..4, 4..8, 8..13]);
        assert_eq!(even_ranges(6, 3).collect::<Vec<_>>(), [0..3, 3..6]);
        assert_eq!(even_ranges(0, 3).count(), 0);
    }
}
