//! Plots of a dataset: factors, a histogram and a heat map. Colours come from CSS classes of the page.

use std::fmt::Write;

use onefold_page::svg::{Anchor, LINE, Svg, number_of_tick, ticks};
use onefold_page::text::{escape, number, percent, short};

/// The values of one group in a [`factors`] plot.
pub(super) struct Factors<'a> {
    pub(super) name: &'a str,
    pub(super) exact: f64,
    pub(super) partial: f64,
    pub(super) predicted: f64,
}

/// Returns a plot with two bars per group, a mark at the prediction, and a scale below.
pub(super) fn factors(label: &str, groups: &[Factors]) -> String {
    const WIDTH: f64 = 1040.0;
    const STEP: f64 = 30.0;
    const LEFT: f64 = 190.0;
    const RIGHT: f64 = 70.0;
    let height = STEP * groups.len() as f64;
    let mut svg = Svg::new(WIDTH, height + 2.6 * LINE, label);
    let largest = groups.iter().flat_map(|g| [g.exact, g.partial, g.predicted]).fold(1.0, f64::max);
    let ticks = ticks(largest, 8);
    let top = ticks.last().copied().unwrap_or(1.0).max(largest);
    let x = |value: f64| LEFT + (WIDTH - LEFT - RIGHT) * value / top;
    for tick in &ticks {
        svg.line((x(*tick), 0.0), (x(*tick), height), "grid");
        svg.text(x(*tick), height + LINE, Anchor::Middle, "tick", &number_of_tick(*tick));
    }
    svg.text(
        (LEFT + WIDTH - RIGHT) / 2.0,
        height + 2.3 * LINE,
        Anchor::Middle,
        "tick",
        "dedupe factor (times fewer ids)",
    );
    for (i, group) in groups.iter().enumerate() {
        let y = STEP * i as f64 + 5.0;
        svg.text(LEFT - 10.0, y + 15.0, Anchor::End, "label", &short(group.name, 26));
        let title = |what: &str, factor: f64| format!("{}: {what} {}", group.name, number(factor));
        svg.rect(LEFT, y, x(group.exact) - LEFT, 9.0, r#"class="rows""#, &title("exact", group.exact));
        let windows = title("with windows", group.partial);
        svg.rect(LEFT, y + 10.0, x(group.partial) - LEFT, 9.0, r#"class="folded""#, &windows);
        svg.rect(
            x(group.predicted) - 1.5,
            y - 3.0,
            3.0,
            15.0,
            r#"class="mark""#,
            &title("predicted", group.predicted),
        );
        let end = x(group.partial.max(group.exact).max(group.predicted)) + 8.0;
        svg.text(end, y + 15.0, Anchor::Start, "value", &number(group.partial.max(group.exact)));
    }
    svg.line((LEFT, 0.0), (LEFT, height), "axis");
    svg.finish()
}

/// Returns a plot of columns side by side over a scale of whole numbers. `marks` are named positions on this scale.
pub(super) fn histogram(
    label: &str,
    axis: &str,
    columns: &[(String, u64)],
    marks: &[(f64, String)],
) -> String {
    const WIDTH: f64 = 1040.0;
    const HEIGHT: f64 = 190.0;
    const LEFT: f64 = 64.0;
    const RIGHT: f64 = 14.0;
    const TOP: f64 = 3.4 * LINE;
    let mut svg = Svg::new(WIDTH, TOP + HEIGHT + 2.8 * LINE, label);
    let largest = columns.iter().map(|(_, count)| *count).max().unwrap_or(1).max(1) as f64;
    let ticks = ticks(largest, 4);
    let top = ticks.last().copied().unwrap_or(1.0).max(largest);
    let y = |count: f64| TOP + HEIGHT - HEIGHT * count / top;
    svg.grid(&ticks, (LEFT, WIDTH - RIGHT), y);
    let step = (WIDTH - LEFT - RIGHT) / columns.len().max(1) as f64;
    // There are as many labels as fit.
    let widest = columns.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(1) as f64;
    let every = ((widest * 7.5 + 8.0) / step).ceil().max(1.0) as usize;
    for (i, (name, count)) in columns.iter().enumerate() {
        let (x, count) = (LEFT + step * i as f64, *count);
        let title = format!("{name}: {}", onefold_base::units::format_count(count));
        let gap = (step * 0.12).min(2.0);
        svg.rect(
            x + gap,
            y(count as f64),
            step - 2.0 * gap,
            TOP + HEIGHT - y(count as f64),
            r#"class="folded""#,
            &title,
        );
        // The last column always has a label, and enough space for it.
        let last = i + 1 == columns.len();
        if last || i % every == 0 && i + every < columns.len() {
            svg.text(x + step / 2.0, TOP + HEIGHT + LINE, Anchor::Middle, "tick", &escape(name));
        }
    }
    svg.line((LEFT, TOP + HEIGHT), (WIDTH - RIGHT, TOP + HEIGHT), "axis");
    svg.text((LEFT + WIDTH - RIGHT) / 2.0, TOP + HEIGHT + 2.4 * LINE, Anchor::Middle, "tick", &escape(axis));
    for (i, (place, name)) in marks.iter().enumerate() {
        let x = (LEFT + step * place).min(WIDTH - RIGHT);
        let line = LINE * (i as f64 + 0.8);
        svg.line((x, line + 3.0), (x, TOP + HEIGHT), "mark-line");
        let near_end = x > WIDTH - 130.0;
        let (shift, anchor) = if near_end { (-5.0, Anchor::End) } else { (5.0, Anchor::Start) };
        svg.text(x + shift, line, anchor, "value", &escape(name));
        svg.line((x, line - 9.0), (x, line + 3.0), "mark-line");
    }
    svg.finish()
}

/// Returns a square of shares from 0 to 1. `starts` are the rows at which a line separates groups.
pub(super) fn heat_map(
    label: &str,
    names: &[String],
    share: &[Vec<Option<f64>>],
    starts: &[usize],
) -> String {
    const WIDTH: f64 = 1040.0;
    let count = names.len().max(1) as f64;
    let cell = ((WIDTH - 180.0) / count).clamp(7.0, 26.0);
    let characters = if cell < 10.0 { 22 } else { 24 };
    let left = 172.0;
    let top = 112.0;
    let size = cell * count;
    let mut svg = Svg::new(left + size + 60.0, top + size + 8.0, label);
    let class = if cell < 11.0 { "tiny" } else { "label" };
    for (i, name) in names.iter().enumerate() {
        let middle = cell * (i as f64 + 0.5);
        svg.text(
            left - 8.0,
            top + middle + 0.3 * cell.min(13.0),
            Anchor::End,
            class,
            &short(name, characters),
        );
        let (x, y) = (left + middle + 0.3 * cell.min(13.0), top - 6.0);
        let _ = write!(
            svg.body,
            r#"<text x="{x:.1}" y="{y:.1}" transform="rotate(-60 {x:.1} {y:.1})" class="{class}">{}</text>"#,
            short(name, 18)
        );
    }
    // Cells have tooltips only if there are not thousands of cells.
    let told = names.len() <= 60;
    for (a, row) in share.iter().enumerate() {
        let y = top + cell * a as f64;
        if row.iter().all(Option::is_none) {
            svg.rect(
                left,
                y,
                size,
                cell - 1.0,
                r#"class="never""#,
                &format!("{} never changes within a session", names[a]),
            );
            continue;
        }
        for (b, share) in row.iter().enumerate() {
            let share = share.unwrap_or(0.0);
            if share < 0.005 && !told {
                continue;
            }
            let title = match told {
                true => format!("where {} changes, {} changes in {}", names[a], names[b], percent(share)),
                false => String::new(),
            };
            let fill = format!(r#"class="heat" fill-opacity="{:.2}""#, share.max(0.03));
            svg.rect(left + cell * b as f64, y, cell - 1.0, cell - 1.0, &fill, &title);
        }
    }
    for start in starts {
        let place = cell * *start as f64 - 0.5;
        svg.line((left, top + place), (left + size, top + place), "part");
        svg.line((left + place, top), (left + place, top + size), "part");
    }
    svg.finish()
}

/// Returns bars of a few pixels for a cell of a table, on the same scale as those of the other rows.
pub(super) fn cell_bars(values: &[(f64, &str)], largest: f64) -> String {
    const WIDTH: f64 = 150.0;
    let mut svg = Svg::new(WIDTH, 5.0 * values.len() as f64, "");
    for (i, (value, class)) in values.iter().enumerate() {
        let length = if largest > 0.0 { WIDTH * value / largest } else { 0.0 };
        svg.rect(0.0, 5.0 * i as f64, length.max(0.5), 4.0, &format!(r#"class="{class}""#), "");
    }
    svg.finish().replace(r#"role="img" aria-label="""#, r#"aria-hidden="true""#)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plots_contain_no_nan_or_infinity() {
        let plots = [
            histogram("a", "b", &[("1".into(), 0)], &[(0.5, "mean".into())]),
            histogram("a", "b", &[], &[]),
            heat_map("a", &[], &[], &[]),
            heat_map("a", &["f".into()], &[vec![None]], &[0]),
            factors("a", &[]),
            cell_bars(&[(0.0, "rows")], 0.0),
        ];
        for plot in plots {
            assert!(plot.starts_with("<svg") && plot.ends_with("</svg>"), "{plot}");
            assert!(!plot.contains("NaN") && !plot.contains("inf"), "{plot}");
        }
    }

    #[test]
    fn names_in_plots_are_escaped() {
        let name = "<script>\"&".to_owned();
        let plot = heat_map(&name, std::slice::from_ref(&name), &[vec![Some(1.0)]], &[]);
        assert!(!plot.contains("<script"), "{plot}");
        assert!(plot.contains("&lt;script&gt;&quot;&amp;"));
    }
}
