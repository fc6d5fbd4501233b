//! Which windows are computed together.

/// A chain is no longer than this many times its longest window: with windows that slide by one, the pairs of a chain
/// per window are fewest there.
const SPAN_PER_WINDOW: usize = 2;

/// Windows of a chain, at most, which bounds the memory of a chain.
const MAX_WINDOWS: usize = 256;

/// Windows that are computed together, and the part of the timeline that they cover.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Chain {
    /// Rows of the feature, by where they start.
    pub(super) windows: Vec<u32>,
    /// The first element of the timeline that a window has.
    pub(super) start: usize,
    /// The end of the last window.
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

    /// What computing it costs, in pairs of elements: the scores, and the projections of every element.
    pub(super) fn cost(&self) -> usize {
        self.span() * self.span() + 200 * self.span()
    }
}

/// Chains whose parts of the timeline overlap each other and nothing else.
pub(super) type Component = Vec<Chain>;

/// The components of a feature's windows, in the order of the timeline, empty windows left out. Without `share`
/// every window is a chain of its own.
///
/// Windows are taken in the order in which they start, and each joins the chain before it if computing the longer
/// chain costs fewer pairs than computing the window alone.
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
        // A window that overlaps by one element costs less alone.
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
