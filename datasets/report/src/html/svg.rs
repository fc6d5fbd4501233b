//! Plots as SVG that stands in the page: bars, a histogram, lines and a heat map. Colours are the page's, by class.

use std::fmt::Write;

use super::text::{escape, number, percent, short};

/// The height of a line of text, in pixels.
const LINE: f64 = 16.0;

/// A picture that is being drawn.
struct Svg {
    width: f64,
    height: f64,
    label: String,
    body: String,
}

/// Where a text stands at its point.
#[derive(Clone, Copy)]
enum Anchor {
    Start,
    Middle,
    End,
}

impl Svg {
    /// An empty picture; `label` says what it shows to those who cannot see it.
    fn new(width: f64, height: f64, label: &str) -> Self {
        Self { width, height, label: escape(label), body: String::new() }
    }

    fn rect(&mut self, x: f64, y: f64, width: f64, height: f64, attributes: &str, title: &str) {
        let (width, height) = (width.max(0.0), height.max(0.0));
        let _ = write!(
            self.body,
            r#"<rect x="{x:.1}" y="{y:.1}" width="{width:.1}" height="{height:.1}" {attributes}"#
        );
        match title {
            "" => self.body.push_str("/>"),
            title => {
                let _ = write!(self.body, "><title>{}</title></rect>", escape(title));
            }
        }
    }

    fn line(&mut self, from: (f64, f64), to: (f64, f64), class: &str) {
        let ((x1, y1), (x2, y2)) = (from, to);
        let _ = write!(
            self.body,
            r#"<line x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}" class="{class}"/>"#
        );
    }

    /// A text that is already escaped.
    fn text(&mut self, x: f64, y: f64, anchor: Anchor, class: &str, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let _ = write!(
            self.body,
            r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}" class="{class}">{text}</text>"#
        );
    }

    fn finish(self) -> String {
        let Self { width, height, label, body } = self;
        format!(
            r#"<svg viewBox="0 0 {width:.0} {height:.0}" style="max-width:{width:.0}px" role="img" aria-label="{label}">{body}</svg>"#
        )
    }
}

/// One bar of a [`bars`] plot.
pub(super) struct Bar<'a> {
    pub(super) label: &'a str,
    pub(super) value: f64,
    /// What stands behind the bar.
    pub(super) text: String,
    /// The class that gives the colour.
    pub(super) class: &'a str,
}

/// Bars that lie below each other, with their labels on the left.
pub(super) fn bars(label: &str, bars: &[Bar], label_width: f64) -> String {
    const WIDTH: f64 = 520.0;
    const STEP: f64 = 34.0;
    const TEXT: f64 = 180.0;
    let mut svg = Svg::new(WIDTH, STEP * bars.len() as f64 + 4.0, label);
    let largest = bars.iter().map(|bar| bar.value).fold(f64::MIN_POSITIVE, f64::max);
    let room = WIDTH - label_width - TEXT;
    for (i, bar) in bars.iter().enumerate() {
        let y = STEP * i as f64 + 4.0;
        let length = (room * bar.value / largest).max(1.0);
        svg.text(label_width - 10.0, y + 18.0, Anchor::End, "label", &escape(bar.label));
        svg.rect(label_width, y, length, STEP - 8.0, &format!(r#"class="{}" rx="2""#, bar.class), "");
        svg.text(label_width + length + 8.0, y + 18.0, Anchor::Start, "value", &escape(&bar.text));
    }
    svg.line((label_width, 0.0), (label_width, STEP * bars.len() as f64), "axis");
    svg.finish()
}

/// What a [`factors`] plot shows of one group.
pub(super) struct Factors<'a> {
    pub(super) name: &'a str,
    pub(super) exact: f64,
    pub(super) partial: f64,
    pub(super) predicted: f64,
}

/// Two bars for each group, and a mark where the prediction is; a scale below.
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

/// Columns side by side over a scale of whole numbers; `marks` are places on it with a name.
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
    for tick in &ticks {
        svg.line((LEFT, y(*tick)), (WIDTH - RIGHT, y(*tick)), "grid");
        svg.text(LEFT - 8.0, y(*tick) + 4.0, Anchor::End, "tick", &number_of_tick(*tick));
    }
    let step = (WIDTH - LEFT - RIGHT) / columns.len().max(1) as f64;
    // As many labels as have room.
    let widest = columns.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(1) as f64;
    let every = ((widest * 7.5 + 8.0) / step).ceil().max(1.0) as usize;
    for (i, (name, count)) in columns.iter().enumerate() {
        let (x, count) = (LEFT + step * i as f64, *count);
        let title = format!("{name}: {}", onefold_datasets::units::format_count(count));
        let gap = (step * 0.12).min(2.0);
        svg.rect(
            x + gap,
            y(count as f64),
            step - 2.0 * gap,
            TOP + HEIGHT - y(count as f64),
            r#"class="folded""#,
            &title,
        );
        // The last one always has its label, and room for it.
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

/// A line of a [`lines`] plot.
pub(super) struct Line<'a> {
    pub(super) name: &'a str,
    pub(super) class: &'a str,
    pub(super) points: Vec<(f64, f64)>,
}

/// Lines over a share from 0 to 1, with their names at their ends.
pub(super) fn lines(label: &str, (x_axis, y_axis): (&str, &str), lines: &[Line]) -> String {
    const WIDTH: f64 = 520.0;
    const HEIGHT: f64 = 230.0;
    const LEFT: f64 = 46.0;
    const RIGHT: f64 = 150.0;
    const TOP: f64 = 1.6 * LINE;
    let mut svg = Svg::new(WIDTH, TOP + HEIGHT + 2.8 * LINE, label);
    let values = lines.iter().flat_map(|line| line.points.iter().map(|(_, y)| *y));
    let largest = values.fold(1.0, f64::max);
    let ticks = ticks(largest, 5);
    let top = ticks.last().copied().unwrap_or(1.0).max(largest);
    let x = |share: f64| LEFT + (WIDTH - LEFT - RIGHT) * share;
    let y = |value: f64| TOP + HEIGHT - HEIGHT * value / top;
    svg.text(0.0, LINE * 0.8, Anchor::Start, "tick", &escape(y_axis));
    for tick in &ticks {
        svg.line((x(0.0), y(*tick)), (x(1.0), y(*tick)), "grid");
        svg.text(LEFT - 8.0, y(*tick) + 4.0, Anchor::End, "tick", &number_of_tick(*tick));
    }
    for share in [0.0, 0.25, 0.5, 0.75, 1.0] {
        svg.text(x(share), TOP + HEIGHT + LINE, Anchor::Middle, "tick", &percent(share));
    }
    svg.text(x(0.5), TOP + HEIGHT + 2.4 * LINE, Anchor::Middle, "tick", &escape(x_axis));
    let mut ends: Vec<(f64, &Line)> = Vec::new();
    for line in lines {
        let points = line.points.iter().map(|(share, value)| format!("{:.1},{:.1}", x(*share), y(*value)));
        let points = points.collect::<Vec<_>>().join(" ");
        let _ = write!(svg.body, r#"<polyline points="{points}" class="line {}"/>"#, line.class);
        ends.extend(line.points.last().map(|(_, value)| (*value, line)));
    }
    // Names do not cover each other, however close the lines end.
    ends.sort_by(|a, b| b.0.total_cmp(&a.0));
    let mut lowest = f64::NEG_INFINITY;
    for (value, line) in ends {
        let place = (y(value) + 4.0).max(lowest + LINE);
        svg.text(
            x(1.0) + 8.0,
            place,
            Anchor::Start,
            "value",
            &format!("{} {}", number(value), escape(line.name)),
        );
        lowest = place;
    }
    svg.line((x(0.0), TOP + HEIGHT), (x(1.0), TOP + HEIGHT), "axis");
    svg.finish()
}

/// A square of shares from 0 to 1; `starts` are rows at which a line parts groups.
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
    // Every cell can tell its figures only while there are not thousands of them.
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

/// Bars of a few pixels for a cell of a table, on one scale with those of the other rows.
pub(super) fn cell_bars(values: &[(f64, &str)], largest: f64) -> String {
    const WIDTH: f64 = 150.0;
    let mut svg = Svg::new(WIDTH, 5.0 * values.len() as f64, "");
    for (i, (value, class)) in values.iter().enumerate() {
        let length = if largest > 0.0 { WIDTH * value / largest } else { 0.0 };
        svg.rect(0.0, 5.0 * i as f64, length.max(0.5), 4.0, &format!(r#"class="{class}""#), "");
    }
    svg.finish().replace(r#"role="img" aria-label="""#, r#"aria-hidden="true""#)
}

/// Round numbers from 0 up to or just above `largest`, about `count` of them.
fn ticks(largest: f64, count: usize) -> Vec<f64> {
    let rough = (largest / count as f64).max(f64::MIN_POSITIVE);
    let power = 10_f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 2.5, 5.0, 10.0].map(|m| m * power).into_iter().find(|step| *step >= rough * 0.999);
    let step = step.unwrap_or(power);
    (0..=(largest / step).ceil() as usize).map(|i| step * i as f64).collect()
}

fn number_of_tick(tick: f64) -> String {
    match tick {
        tick if tick >= 1000.0 => onefold_datasets::units::format_count(tick.round() as u64),
        tick => format!("{}", (tick * 1000.0).round() / 1000.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_have_round_numbers_up_to_the_largest() {
        assert_eq!(ticks(7.3, 4), [0.0, 2.0, 4.0, 6.0, 8.0]);
        assert_eq!(ticks(1.0, 5), [0.0, 0.2, 0.4, 0.6000000000000001, 0.8, 1.0]);
        assert_eq!(ticks(23_000.0, 4).last(), Some(&30_000.0));
        assert_eq!(
            ["0", "0.6", "2.5", "30,000"],
            [0.0, 0.6000000000000001, 2.5, 30_000.0].map(number_of_tick).each_ref().map(String::as_str)
        );
    }

    #[test]
    fn plots_hold_no_number_that_is_none() {
        let none: [Bar; 0] = [];
        let plots = [
            bars("a", &none, 100.0),
            bars("a", &[Bar { label: "x", value: 0.0, text: "0".into(), class: "rows" }], 100.0),
            histogram("a", "b", &[("1".into(), 0)], &[(0.5, "mean".into())]),
            histogram("a", "b", &[], &[]),
            lines(
                "a",
                ("x", "y"),
                &[Line { name: "n", class: "rows", points: vec![(0.0, 1.0), (1.0, 1.0)] }],
            ),
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
