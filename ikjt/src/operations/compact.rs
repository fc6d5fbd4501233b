//! Rows, samples and features chosen by number or name, and what is left of a group when unused rows go.

use arrow::buffer::ScalarBuffer;
use arrow::datatypes::ArrowNativeType;
use onefold_datasets::suggest;

use super::used::{Renumbering, UsedRows};
use crate::builder::check_values;
use crate::{Batch, BatchParts, Error, Feature, Group, Result};

impl Feature {
    /// Row `rows[k]` as row `k`, copied one after the other: a jagged index select.
    ///
    /// # Errors
    ///
    /// [`Error::Invariant`] if a number is no row, or the copies have more ids than `i32` counts.
    pub fn index_select(&self, rows: &[i32]) -> Result<Self> {
        check_indices(&format!("feature `{}`", self.name()), "row", rows, self.rows())?;
        self.checked_gather(rows.iter().map(|&row| row as usize))
    }

    /// The rows one after the other in the values, without overlaps or gaps. Costs nothing where they stand so.
    ///
    /// # Errors
    ///
    /// [`Error::Invariant`] if the rows have more ids than `i32` counts.
    pub fn compact(&self) -> Result<Self> {
        if self.is_compact() { Ok(self.clone()) } else { self.checked_gather(0..self.rows()) }
    }

    /// Whether the rows stand one after the other, and nothing beside them.
    pub(crate) fn is_compact(&self) -> bool {
        let mut end = 0;
        let one_after_the_other = (0..self.rows()).all(|row| {
            let span = self.span(row);
            let follows = span.start == end;
            end = span.end;
            follows
        });
        one_after_the_other && end == self.values().len()
    }

    /// [`gather`](Self::gather) of rows in range, if their ids can be addressed.
    pub(crate) fn checked_gather(&self, rows: impl IntoIterator<Item = usize> + Clone) -> Result<Self> {
        let sizes = self.sizes();
        check_values(
            format_args!("feature `{}`", self.name()),
            rows.clone().into_iter().map(|row| sizes[row] as u64).sum(),
        )?;
        Ok(self.gather(rows))
    }
}

impl Group {
    /// Sample `samples[k]` as sample `k`. Only the inverse index is new: no row moves, and rows that no sample uses any
    /// more stay until [`compact`](Self::compact).
    ///
    /// # Errors
    ///
    /// [`Error::Invariant`] if a number is no sample.
    pub fn index_select(&self, samples: &[i32]) -> Result<Self> {
        check_indices(&format!("group `{}`", self.name()), "sample", samples, self.samples())?;
        let inverse: ScalarBuffer<i32> = match self.inverse() {
            None => samples.to_vec().into(),
            Some(inverse) => samples.iter().map(|&sample| inverse[sample as usize]).collect(),
        };
        Ok(Self::trusted(self.shared_name(), Some(inverse), self.rows(), self.features().to_vec()))
    }

    /// The same samples with only the rows that they use, in the order of first use and one after the other: windows
    /// become whole lists. Buffers that are so already are shared.
    ///
    /// # Errors
    ///
    /// [`Error::Invariant`] if the rows of a feature have more ids than `i32` counts.
    pub fn compact(&self) -> Result<Self> {
        let mut inverse = self.inverse().map(|_| Vec::with_capacity(self.samples()));
        let used = Renumbering::default().used_rows(self, 0..self.samples(), 0, inverse.as_mut());
        let all = matches!(&used, UsedRows::Range(rows) if *rows == (0..self.rows()));
        let features = self.features().iter().map(|feature| match &used {
            _ if all => feature.compact(),
            UsedRows::Range(rows) => feature.checked_gather(rows.clone()),
            UsedRows::Listed(rows) => feature.checked_gather(rows.iter().map(|&row| row as usize)),
        });
        let features = features.collect::<Result<_>>()?;
        let inverse = if all { self.inverse().cloned() } else { inverse.map(Into::into) };
        Ok(Self::trusted(self.shared_name(), inverse, used.len(), features))
    }

    /// The features `features`, by number in this group; there is one, and all are in range.
    pub(crate) fn with_features(&self, features: impl IntoIterator<Item = usize>) -> Self {
        let features = features.into_iter().map(|i| self.features()[i].clone()).collect();
        Self::trusted(self.shared_name(), self.inverse().cloned(), self.rows(), features)
    }
}

impl Batch {
    /// Sample `samples[k]` as sample `k`: [`Group::index_select`] for every group, and copies of all that samples have
    /// to themselves.
    ///
    /// # Errors
    ///
    /// [`Error::Invariant`] if a number is no sample.
    pub fn index_select(&self, samples: &[i32]) -> Result<Self> {
        check_indices("batch", "sample", samples, self.size())?;
        let groups = self.groups().iter().map(|group| group.index_select(samples)).collect::<Result<_>>()?;
        Ok(Self::trusted(BatchParts {
            size: samples.len(),
            dense: select_rows(self.dense(), samples, self.dense_width()),
            labels: select_rows(self.labels(), samples, self.label_width()),
            weights: self.weights().map(|weights| select_rows(weights, samples, 1)),
            timestamps: self.timestamps().map(|timestamps| select_rows(timestamps, samples, 1)),
            groups,
        }))
    }

    /// The sparse features `names`, in this batch's order, whatever the order of the names. Groups left without
    /// features disappear. All buffers are shared.
    ///
    /// # Errors
    ///
    /// [`Error::Options`] if a name is no feature of the batch.
    pub fn select(&self, names: &[impl AsRef<str>]) -> Result<Self> {
        let all = || self.groups().iter().flat_map(|group| group.features().iter().map(Feature::name));
        for name in names {
            let name = name.as_ref();
            if !all().any(|known| known == name) {
                let message = format!("the batch has no sparse feature `{name}`");
                return Err(Error::Options { message, hint: suggest(name, all()) });
            }
        }
        let chosen = |name: &str| names.iter().any(|wanted| wanted.as_ref() == name);
        let numbers = all().enumerate().filter(|(_, name)| chosen(name)).map(|(i, _)| i);
        self.permute(&numbers.collect::<Vec<_>>())
    }

    /// The sparse features `features`, in this order, by number: features count through the groups. A group stands
    /// where its first feature is named, and the others of its features follow in their order; groups left without
    /// features disappear. All buffers are shared.
    ///
    /// # Errors
    ///
    /// [`Error::Invariant`] if a number is no feature, or stands there twice.
    pub fn permute(&self, features: &[usize]) -> Result<Self> {
        let places: Vec<(usize, usize)> = self
            .groups()
            .iter()
            .enumerate()
            .flat_map(|(g, group)| (0..group.features().len()).map(move |f| (g, f)))
            .collect();
        let mut taken = vec![false; places.len()];
        // By group, in the order of first mention: its features.
        let mut chosen: Vec<(usize, Vec<usize>)> = Vec::new();
        for &feature in features {
            let wrong = |problem: &str| {
                Err(Error::invariant("batch", format!("feature {feature} of {} {problem}", places.len())))
            };
            let Some(&(g, f)) = places.get(feature) else { return wrong("does not exist") };
            if std::mem::replace(&mut taken[feature], true) {
                return wrong("is chosen twice");
            }
            match chosen.iter_mut().find(|(group, _)| *group == g) {
                Some((_, list)) => list.push(f),
                None => chosen.push((g, vec![f])),
            }
        }
        let groups = chosen.into_iter().map(|(g, list)| self.groups()[g].with_features(list)).collect();
        Ok(Self::trusted(BatchParts { groups, ..self.clone().into_parts() }))
    }
}

/// Checks that `indices` number some of `count` things, and are no more than `i32` counts.
fn check_indices(place: &str, what: &str, indices: &[i32], count: usize) -> Result<()> {
    if i32::try_from(indices.len()).is_err() {
        return Err(Error::invariant(place, format!("{} {what}s are more than 2^31 - 1", indices.len())));
    }
    let wrong = |index: &i32| usize::try_from(*index).ok().is_none_or(|index| index >= count);
    match indices.iter().position(wrong) {
        None => Ok(()),
        Some(k) => {
            Err(Error::invariant(place, format!("index {k} selects {what} {} of {count}", indices[k])))
        }
    }
}

/// Rows of a `[B, width]` matrix, copied.
fn select_rows<T: ArrowNativeType>(matrix: &ScalarBuffer<T>, rows: &[i32], width: usize) -> ScalarBuffer<T> {
    let mut selected = Vec::with_capacity(rows.len() * width);
    for &row in rows {
        selected.extend_from_slice(&matrix[row as usize * width..][..width]);
    }
    selected.into()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::arbitrary::{List, batches, groups, list, lists, samples};

    /// Random numbers as indices below `count`; none if there is nothing to choose.
    fn indices(numbers: &[usize], count: usize) -> Vec<i32> {
        numbers.iter().filter_map(|number| Some(number.checked_rem(count)? as i32)).collect()
    }

    fn numbers() -> impl Strategy<Value = Vec<usize>> {
        prop::collection::vec(any::<usize>(), 0..12)
    }

    proptest! {
        #[test]
        fn index_select_copies_rows(group in groups(), numbers in numbers()) {
            for feature in group.features() {
                let rows = indices(&numbers, feature.rows());
                let selected = feature.index_select(&rows).unwrap();
                let expected: Vec<List> = rows.iter().map(|&row| list(feature, row as usize)).collect();
                prop_assert_eq!((0..selected.rows()).map(|u| list(&selected, u)).collect::<Vec<_>>(), expected);
                prop_assert!(selected.is_compact());
            }
        }

        #[test]
        fn index_select_of_samples_commutes_with_expand(batch in batches(), numbers in numbers()) {
            let chosen = indices(&numbers, batch.size());
            let selected = batch.index_select(&chosen).unwrap();
            let all = samples(&batch);
            let expected: Vec<_> = chosen.iter().map(|&i| all[i as usize].clone()).collect();
            prop_assert_eq!(samples(&selected), expected);
            prop_assert_eq!(selected.expand(), batch.expand().index_select(&chosen).unwrap().expand());
            for (new, old) in selected.groups().iter().zip(batch.groups()) {
                prop_assert_eq!(new.rows(), old.rows());
                prop_assert_eq!(new.features()[0].values().as_ptr(), old.features()[0].values().as_ptr());
            }
        }

        #[test]
        fn compacting_changes_no_sample_and_leaves_nothing_over(group in groups()) {
            let compact = group.compact().unwrap();
            prop_assert_eq!(lists(&compact), lists(&group));
            prop_assert!(compact.features().iter().all(Feature::is_compact));
            let used: std::collections::BTreeSet<_> = (0..group.samples()).map(|i| group.row_of(i)).collect();
            prop_assert_eq!(compact.rows(), used.len());
            let again = compact.compact().unwrap();
            prop_assert_eq!(again.features()[0].values().as_ptr(), compact.features()[0].values().as_ptr());
            prop_assert_eq!(again, compact);
        }

        #[test]
        fn permuting_commutes_with_expand(batch in batches(), numbers in numbers()) {
            let count = batch.groups().iter().map(|group| group.features().len()).sum();
            let mut chosen: Vec<usize> = indices(&numbers, count).into_iter().map(|i| i as usize).collect();
            let mut seen = std::collections::BTreeSet::new();
            chosen.retain(|i| seen.insert(*i));
            let permuted = batch.permute(&chosen).unwrap();
            prop_assert_eq!(permuted.expand(), batch.expand().permute(&chosen).unwrap());
            // Every feature chosen is there with its lists, in the order of the numbers within its group.
            let by_number = |batch: &Batch| -> Vec<Feature> {
                batch.expand().groups().iter().flat_map(|group| group.features().to_vec()).collect()
            };
            let (all, found) = (by_number(&batch), by_number(&permuted));
            prop_assert_eq!(found.len(), chosen.len());
            for group in permuted.groups() {
                let expected: Vec<_> = chosen.iter().map(|&i| all[i].name())
                    .filter(|name| name.starts_with(&group.name().replace('g', "f"))).collect();
                prop_assert_eq!(group.features().iter().map(Feature::name).collect::<Vec<_>>(), expected);
            }
            for feature in &found {
                prop_assert_eq!(feature, all.iter().find(|other| other.name() == feature.name()).unwrap());
            }
        }

        #[test]
        fn selecting_by_name_keeps_the_order(batch in batches(), keep in any::<u16>()) {
            let mut names: Vec<_> = batch.groups().iter()
                .flat_map(|group| group.features().iter().map(|feature| feature.name().to_owned()))
                .enumerate().filter(|(i, _)| keep >> i & 1 == 1).map(|(_, name)| name).collect();
            let expected = names.clone();
            names.reverse();
            let selected = batch.select(&names).unwrap();
            let found: Vec<_> = selected.groups().iter()
                .flat_map(|group| group.features().iter().map(|feature| feature.name().to_owned())).collect();
            prop_assert_eq!(found, expected);
            prop_assert_eq!(selected.dense(), batch.dense());
        }
    }

    #[test]
    fn what_does_not_exist_cannot_be_selected() {
        let feature = Feature::from_rows("history", &[[1], [2]]).unwrap();
        assert_eq!(
            feature.index_select(&[0, 2]).unwrap_err().to_string(),
            "feature `history`: index 1 selects row 2 of 2"
        );
        let group = Group::try_new("user", None, vec![feature]).unwrap();
        assert_eq!(
            group.index_select(&[-1]).unwrap_err().to_string(),
            "group `user`: index 0 selects sample -1 of 2"
        );
        let batch = Batch::try_new(BatchParts {
            size: 2,
            dense: vec![].into(),
            labels: vec![].into(),
            weights: None,
            timestamps: None,
            groups: vec![group],
        });
        let batch = batch.unwrap();
        assert_eq!(
            batch.select(&["histroy"]).unwrap_err().to_string(),
            "the batch has no sparse feature `histroy`\n  hint: did you mean `history`? Known names: `history`"
        );
        assert_eq!(batch.permute(&[0, 0]).unwrap_err().to_string(), "batch: feature 0 of 1 is chosen twice");
        assert_eq!(batch.permute(&[1]).unwrap_err().to_string(), "batch: feature 1 of 1 does not exist");
    }

    #[test]
    fn compacting_what_is_compact_shares_it() {
        let feature = Feature::from_rows("x", &[[1], [2]]).unwrap();
        let group = Group::try_new("g", Some(vec![0, 1, 0].into()), vec![feature]).unwrap();
        let compact = group.compact().unwrap();
        assert_eq!(compact.features()[0].values().as_ptr(), group.features()[0].values().as_ptr());
        assert_eq!(compact.inverse().map(|i| i.as_ptr()), group.inverse().map(|i| i.as_ptr()));
    }

    #[test]
    fn copies_that_cannot_be_addressed_are_refused() {
        let feature = Feature::try_new("x", vec![0; 1 << 24], None, vec![0], vec![1 << 24]).unwrap();
        let refused = feature.index_select(&[0; 128]).unwrap_err().to_string();
        assert!(refused.starts_with("feature `x`: 2147483648 ids are more than"), "{refused}");
        let rows = Feature::try_new("x", vec![0; 1 << 24], None, vec![0; 128], vec![1 << 24; 128]).unwrap();
        assert!(rows.compact().is_err());
    }
}
