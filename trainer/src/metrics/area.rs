//! The area under the ROC curve.

/// Sums over scores in ascending order. Each score has the weights of its negative and positive samples.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Area {
    pub(super) negative: f64,
    pub(super) positive: f64,
    /// The weight of pairs in which the positive sample has the higher score; pairs of equal scores count half.
    pub(super) won: f64,
    /// The weight of pairs of equal scores.
    pub(super) ties: f64,
}

impl Area {
    pub(super) fn of(scores: impl IntoIterator<Item = [f64; 2]>) -> Self {
        let mut area = Self::default();
        for [negative, positive] in scores {
            area.won += positive * (area.negative + negative / 2.0);
            area.ties += positive * negative;
            area.negative += negative;
            area.positive += positive;
        }
        area
    }
}
