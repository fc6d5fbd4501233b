//! The overlap of two consecutive states of a sliding window, and the place of a list within another one. Both use the
//! failure function of Knuth, Morris and Pratt (1977).

/// Returns the largest `n` such that `next` starts with the last `n` items of `previous`: the number of items
/// that a window kept when new items were appended and old items dropped. Returns 0 if it kept no item.
///
/// The time is linear in the lengths for any input: the function first tries small shifts, with a limited
/// number of comparisons, and then continues with the failure function.
pub fn overlap<T: Eq>(previous: &[T], next: &[T]) -> usize {
    let longest = previous.len().min(next.len());
    let tail = &previous[previous.len() - longest..];
    // Real windows shift by a few items, so an early shift usually fits. The credit limits the cost of the
    // other shifts.
    let mut credit = 4 * longest;
    for shift in 0..longest {
        let kept = &tail[shift..];
        let equal = kept.iter().zip(next).take_while(|(a, b)| a == b).count();
        if equal == kept.len() {
            return equal;
        }
        if equal > credit {
            return overlap_linear(kept, next);
        }
        credit -= equal;
    }
    0
}

/// Runs the KMP automaton of `next` over `text`. The final state is the longest prefix of `next` that is a
/// suffix of `text`.
fn overlap_linear<T: Eq>(text: &[T], next: &[T]) -> usize {
    let pattern = &next[..next.len().min(text.len())];
    let failure = failure_of(pattern);
    let mut state = 0;
    for item in text {
        if state == pattern.len() {
            state = failure[state - 1];
        }
        state = step(pattern, &failure, state, item);
    }
    state
}

/// Returns the first position of `pattern`, which must not be empty, in `text`. The time is linear in the lengths.
pub fn position_of<T: Eq>(pattern: &[T], text: &[T]) -> Option<usize> {
    if text.len() == pattern.len() {
        return (text == pattern).then_some(0);
    }
    let possible = &text[..(text.len() + 1).checked_sub(pattern.len())?];
    let start = possible.iter().position(|item| *item == pattern[0])?;
    let failure = failure_of(pattern);
    let mut state = 0;
    for (i, item) in text.iter().enumerate().skip(start) {
        state = step(pattern, &failure, state, item);
        if state == pattern.len() {
            return Some(i + 1 - state);
        }
    }
    None
}

/// Returns, for each prefix of the pattern, the length of its longest proper prefix that is also a suffix of it.
fn failure_of<T: Eq>(pattern: &[T]) -> Vec<usize> {
    let mut failure = vec![0; pattern.len()];
    let mut state = 0;
    for i in 1..pattern.len() {
        state = step(pattern, &failure, state, &pattern[i]);
        failure[i] = state;
    }
    failure
}

fn step<T: Eq>(pattern: &[T], failure: &[usize], mut state: usize, item: &T) -> usize {
    while state > 0 && pattern[state] != *item {
        state = failure[state - 1];
    }
    state + usize::from(pattern[state] == *item)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn naive(previous: &[i64], next: &[i64]) -> usize {
        (0..=previous.len().min(next.len())).rev().find(|n| previous.ends_with(&next[..*n])).unwrap()
    }

    proptest! {
        #[test]
        fn overlaps_equal_the_definition(
            previous in prop::collection::vec(0_i64..2, 0..40),
            next in prop::collection::vec(0_i64..2, 0..40),
        ) {
            prop_assert_eq!(overlap(&previous, &next), naive(&previous, &next));
            if !previous.is_empty() && !next.is_empty() {
                prop_assert_eq!(overlap_linear(&previous, &next), naive(&previous, &next));
            }
        }

        #[test]
        fn positions_equal_the_definition(
            text in prop::collection::vec(0_i64..2, 0..30),
            pattern in prop::collection::vec(0_i64..2, 1..6),
        ) {
            let naive = text.windows(pattern.len()).position(|window| window == pattern);
            prop_assert_eq!(position_of(&pattern, &text), naive);
        }
    }

    #[test]
    fn a_shifted_window_overlaps_in_the_ids_that_remain() {
        assert_eq!(overlap(&[1, 2, 3, 4], &[3, 4, 5]), 2);
        assert_eq!(overlap(&[1, 2, 3], &[1, 2, 3]), 3);
        assert_eq!(overlap(&[1, 2, 3], &[2, 3]), 2);
        assert_eq!(overlap(&[1, 2, 3], &[4, 1, 2]), 0);
        assert_eq!(overlap(&[], &[1]), 0);
    }

    #[test]
    fn repetitive_lists_take_linear_time() {
        // Every shift matches almost to the end, so a quadratic algorithm would need 10^12 comparisons.
        let mut previous = vec![0; 1_000_000];
        previous.push(1);
        let mut next = vec![0; 1_000_000];
        next.push(2);
        assert_eq!(overlap(&previous, &next), 0);
    }
}
