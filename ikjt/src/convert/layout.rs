//! What the keys, lengths, offsets, strides and inverse indices of a KeyedJaggedTensor must satisfy.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use arrow::buffer::ScalarBuffer;

use crate::{Error, Result};

pub(super) fn wrong<T>(message: impl Into<String>) -> Result<T> {
    Err(Error::invariant("KeyedJaggedTensor", message))
}

pub(super) fn first_repeated(keys: &[Arc<str>]) -> Option<&str> {
    let mut seen = HashSet::new();
    keys.iter().map(AsRef::as_ref).find(|key| !seen.insert(*key))
}

/// Both lengths and offsets, of either or both.
pub(super) fn complete(
    lengths: Option<ScalarBuffer<i32>>,
    offsets: Option<ScalarBuffer<i32>>,
    values: usize,
) -> Result<(ScalarBuffer<i32>, ScalarBuffer<i32>)> {
    let (lengths, offsets) = match (lengths, offsets) {
        (None, None) => return wrong("neither lengths nor offsets are given"),
        (None, Some(offsets)) => (differences(&offsets)?, offsets),
        (Some(lengths), None) => {
            let sums = sums(&lengths)?;
            (lengths, sums)
        }
        (Some(lengths), Some(offsets)) => {
            if differences(&offsets)? != lengths {
                return wrong("the offsets are not the sums of the lengths");
            }
            (lengths, offsets)
        }
    };
    match offsets.last() {
        Some(&end) if end as usize == values => Ok((lengths, offsets)),
        end => wrong(format!("the lists end at {}, but there are {values} values", end.unwrap_or(&0))),
    }
}

fn sums(lengths: &[i32]) -> Result<ScalarBuffer<i32>> {
    let mut offsets = Vec::with_capacity(lengths.len() + 1);
    let mut end = 0_i32;
    offsets.push(end);
    for (list, &length) in lengths.iter().enumerate() {
        if length < 0 {
            return wrong(format!("list {list} has length {length}"));
        }
        match end.checked_add(length) {
            Some(sum) => end = sum,
            None => return wrong(format!("list {list} ends beyond what 32-bit offsets address")),
        }
        offsets.push(end);
    }
    Ok(offsets.into())
}

fn differences(offsets: &[i32]) -> Result<ScalarBuffer<i32>> {
    if offsets.first().is_none_or(|&first| first != 0) {
        return wrong(format!("the offsets start at {:?}, not at 0", offsets.first()));
    }
    if let Some(list) = offsets.windows(2).position(|pair| pair[1] < pair[0]) {
        return wrong(format!("list {list} has offsets {}..{}", offsets[list], offsets[list + 1]));
    }
    Ok(offsets.windows(2).map(|pair| pair[1] - pair[0]).collect())
}

/// By key: its lists among all `count`.
pub(super) fn lists_of_keys(
    keys: &[Arc<str>],
    strides: Option<&[Vec<i64>]>,
    count: usize,
) -> Result<Vec<Range<usize>>> {
    let Some(strides) = strides else {
        let stride = count.checked_div(keys.len()).unwrap_or(0);
        if stride * keys.len() != count {
            return wrong(format!("{count} lists for {} keys", keys.len()));
        }
        return Ok((0..keys.len()).map(|key| key * stride..(key + 1) * stride).collect());
    };
    if strides.len() != keys.len() {
        return wrong(format!("strides of {} keys for {} keys", strides.len(), keys.len()));
    }
    let mut end = 0_usize;
    let mut lists = Vec::with_capacity(keys.len());
    for (key, strides_of_key) in keys.iter().zip(strides) {
        if strides_of_key.len() != strides[0].len() {
            let (got, expected) = (strides_of_key.len(), strides[0].len());
            return wrong(format!("key `{key}` has strides of {got} ranks, the first key of {expected}"));
        }
        let start = end;
        for &stride in strides_of_key {
            match usize::try_from(stride).ok().and_then(|stride| end.checked_add(stride)) {
                Some(sum) => end = sum,
                None => return wrong(format!("key `{key}` has stride {stride}")),
            }
        }
        lists.push(start..end);
    }
    if end != count {
        wrong(format!("the strides sum to {end}, but there are {count} lists"))
    } else {
        Ok(lists)
    }
}

/// By key: its place among the `names` of inverse indices.
pub(super) fn places_of_keys(
    keys: &[Arc<str>],
    lists: &[Range<usize>],
    names: &[Arc<str>],
    indices: &[i64],
) -> Result<Vec<usize>> {
    let known: HashMap<_, _> = names.iter().enumerate().map(|(place, name)| (name, place)).collect();
    let places: Vec<usize> = keys.iter().filter_map(|key| known.get(key).copied()).collect();
    if names.len() != keys.len() || places.len() != keys.len() {
        return wrong(format!("inverse indices of {names:?} for keys {keys:?}"));
    }
    let samples = indices.len().checked_div(names.len()).unwrap_or(0);
    if samples * names.len() != indices.len() {
        return wrong(format!("{} inverse indices for {} keys", indices.len(), names.len()));
    }
    for ((key, lists), &place) in keys.iter().zip(lists).zip(&places) {
        let of_key = &indices[place * samples..(place + 1) * samples];
        let wrong_row = |row: &i64| usize::try_from(*row).ok().is_none_or(|row| row >= lists.len());
        if let Some(sample) = of_key.iter().position(wrong_row) {
            let (row, rows) = (of_key[sample], lists.len());
            return wrong(format!(
                "the inverse indices of key `{key}` lead sample {sample} to row {row} of {rows}"
            ));
        }
    }
    Ok(places)
}
