//! The choice of windows that are computed together.

/// The maximum length of a chain, as a multiple of its longest window. For windows that slide by one, this length
/// minimizes the pairs per window.
const SPAN_PER_WINDOW: usize = 2;

/// The maximum number of windows per chain, which bounds the memory of a chain.
const MAX_WINDOWS: usize = 256;

/// Windows that are computed together, and the part of the timeline that they cover.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Chain {
    /// The rows of the feature, ordered by their first element.
    pub(super) windows: Vec<u32>,
    /// The first element of the timeline that belongs to a window.
    pub(super) start: usize,
    /// The end of the part of the timeline that the windows cover.
    pub(super) end: usize,
}

impl Chain {
    /// A chain of one window.
    pub(super) fn of(window: u32, start: usize, size: usize) -> Self {
        Self { windows: vec![window], start, end: start + size }
    }

    pub(super) fn span(&self) -> usize {
        self.end - self.start
    }

    /// Returns the cost of the chain in pairs of elements: its scores, and the projections of its elements.
    pub(super) fn cost(&self) -> usize {
        self.span() * self.span() + 200 * self.span()
    }
}

/// Chains that overlap each other; different components do not overlap.
pub(super) type Component = Vec<Chain>;

/// Returns the components of a feature's windows, in the order of the timeline, without empty windows. Without
/// `share`, every window is a separate chain.
///
/// Takes windows in the order of their first elements. A window joins the previous chain if that adds no more pairs
/// than a separate computation of the window.
pub(super) fn components(offsets: &[i32], sizes: &[i32], share: bool) -> Vec<Component> {
    let mut order: Vec<u32> = (0..sizes.len() as u32).filter(|&row| sizes[row as usize] > 0).collect();
    order.sort_by_key(|&row| offsets[row as usize]);
    let mut components: Vec<Component> = Vec::new();
    let (mut end, mut longest) = (0, 0);
    for window in order {
        let (offset, size) = (offsets[window as usize] as usize, sizes[window as usize] as usize);
        match components.last_mut().filter(|_| offset < end) {
            None => {
                components.push(vec![Chain::of(window, offset, size)]);
                longest = size;
            }
            Some(component) => match component.last_mut() {
                Some(chain) if share && joins(chain, offset, size, longest) => {
                    chain.windows.push(window);
                    chain.end = chain.end.max(offset + size);
                    longest = longest.max(size);
                }
                _ => {
                    component.push(Chain::of(window, offset, size));
                    longest = size;
                }
            },
        }
        end = end.max(offset + size);
    }
    components
}

fn joins(chain: &Chain, offset: usize, size: usize, longest: usize) -> bool {
    let span = chain.end.max(offset + size) - chain.start;
    let grown = span * span - chain.span() * chain.span();
    chain.windows.len() < MAX_WINDOWS && grown <= size * size && span <= SPAN_PER_WINDOW * longest.max(size)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn sliding_windows_share_a_chain_and_distant_ones_do_not() {
        let windows = |component: &Component| component.iter().map(|c| c.windows.clone()).collect::<Vec<_>>();
        let found = components(&[0, 1, 2, 50, 10], &[10, 10, 10, 4, 0], true);
        assert_eq!(found.iter().map(windows).collect::<Vec<_>>(), [vec![vec![0, 1, 2]], vec![vec![3]]]);
        let found = components(&[0, 1, 2], &[10, 10, 10], false);
        assert_eq!(found.iter().map(windows).collect::<Vec<_>>(), [vec![vec![0], vec![1], vec![2]]]);
        // A window that overlaps by one element costs less separately.
        let found = components(&[0, 9], &[10, 10], true);
        assert_eq!(found.iter().map(windows).collect::<Vec<_>>(), [vec![vec![0], vec![1]]]);
    }

    proptest! {
        #[test]
        fn every_window_is_in_one_chain_and_components_are_apart(
            windows in prop::collection::vec((0_i32..60, 0_i32..20), 0..40), share: bool,
        ) {
            let (offsets, sizes): (Vec<i32>, Vec<i32>) = windows.into_iter().unzip();
            let found = components(&offsets, &sizes, share);
            let mut seen: Vec<u32> = found.iter().flatten().flat_map(|chain| chain.windows.clone()).collect();
            seen.sort_unstable();
            let expected: Vec<u32> = (0..sizes.len() as u32).filter(|&row| sizes[row as usize] > 0).collect();
            prop_assert_eq!(seen, expected);
            let mut end = 0;
            for component in &found {
                for chain in component {
                    prop_assert!(chain.start >= end);
                    for &window in &chain.windows {
                        let (offset, size) = (offsets[window as usize] as usize, sizes[window as usize] as usize);
                        prop_assert!(chain.start <= offset && offset + size <= chain.end);
                    }
                }
                end = component.iter().map(|chain| chain.end).max().unwrap();
            }
        }
    }
}
