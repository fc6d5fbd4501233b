//! Formats the statistics of a build as a table.

use crate::config::FeatureKind;
use crate::statistics::{BuildStatistics, ColumnStatistics, ValueStatistics};
use onefold_base::units::format_count;

/// Returns a heading and one line per feature column.
pub(super) fn table(statistics: &BuildStatistics) -> Vec<String> {
    let heading = ["feature", "kind", "null", "empty", "length", "distinct", "values"];
    let mut rows = vec![heading.map(str::to_owned)];
    rows.extend(statistics.features.iter().map(row));
    let widths: [usize; 7] =
        std::array::from_fn(|i| rows.iter().map(|row| row[i].chars().count()).max().unwrap_or(0));
    let line = |row: &[String; 7]| {
        let cells = row.iter().zip(widths).enumerate().map(|(i, (cell, width))| match i {
            2..=5 => format!("{cell:>width$}"),
            _ => format!("{cell:<width$}"),
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

fn row(feature: &ColumnStatistics) -> [String; 7] {
    let kind = match feature.kind {
        FeatureKind::Label => "label",
        FeatureKind::Weight => "weight",
        FeatureKind::Dense => "dense",
        FeatureKind::Sparse => "sparse",
        FeatureKind::Sequence => "sequence",
    };
    let none = String::new;
    let [null, empty, length, distinct, values] = match &feature.values {
        ValueStatistics::Number { min, max, positive_share } => {
            let positive = match feature.kind {
                FeatureKind::Label => format!(", {} above 0", percent(*positive_share)),
                _ => none(),
            };
            [none(), none(), none(), none(), format!("{min} to {max}{positive}")]
        }
        ValueStatistics::List {
            null_share,
            empty_share,
            mean_length,
            distinct_ids,
            min_id,
            max_id,
            expected_collisions,
            ..
        } => [
            percent(*null_share),
            percent(*empty_share),
            format!("{mean_length:.1}"),
            format!("~{}", format_count(*distinct_ids)),
            match (min_id, max_id, expected_collisions) {
                (Some(min), Some(max), _) => format!("{min} to {max}"),
                (_, _, Some(collisions)) => format!("hashes, {collisions:.1e} collisions expected"),
                _ => none(),
            },
        ],
    };
    [feature.name.clone(), kind.to_owned(), null, empty, length, distinct, values]
}

/// Formats a fraction in percent. Only exact values are shown as 0 % and 100 %.
fn percent(share: f64) -> String {
    match share {
        0.0 => "0 %".to_owned(),
        1.0 => "100 %".to_owned(),
        small if small < 0.001 => "<0.1 %".to_owned(),
        large if large > 0.999 => ">99.9 %".to_owned(),
        share => format!("{:.1} %", 100.0 * share),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_a_line_for_each_feature() {
        let number = ValueStatistics::Number { min: 0.0, max: 1.0, positive_share: 0.0317 };
        let list = ValueStatistics::List {
            null_share: 0.25,
            empty_share: 0.9995,
            mean_length: 12.34,
            distinct_ids: 1_234_567,
            is_constant: false,
            min_id: Some(-3),
            max_id: Some(99),
            expected_collisions: None,
        };
        let feature = |name: &str, kind, values| ColumnStatistics { name: name.to_owned(), kind, values };
        let statistics = BuildStatistics {
            features: vec![
                feature("clicked", FeatureKind::Label, number),
                feature("past", FeatureKind::Sequence, list),
            ],
            ..BuildStatistics::default()
        };
        assert_eq!(
            table(&statistics),
            [
                "feature  kind        null    empty  length    distinct  values",
                "clicked  label                                          0 to 1, 3.2 % above 0",
                "past     sequence  25.0 %  >99.9 %    12.3  ~1,234,567  -3 to 99",
            ]
        );
    }

    #[test]
    fn shares_are_not_rounded_to_0_or_100_percent() {
        let shares = [0.0, 1e-9, 0.5, 1.0 - 1e-9, 1.0].map(percent);
        assert_eq!(shares, ["0 %", "<0.1 %", "50.0 %", ">99.9 %", "100 %"]);
    }
}
