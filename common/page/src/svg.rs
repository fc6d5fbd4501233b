//! SVG pictures that are embedded in a page, and plots that several pages share. Colours come from CSS classes of the
//! page.

use std::fmt::Write;

use crate::text::{escape, number, percent, precise, short};

/// The height of a line of text, in pixels.
pub const LINE: f64 = 16.0;

/// The width of a plot, and the height, top and bottom of the area that shows values, in pixels.
const WIDTH: f64 = 520.0;
const HEIGHT: f64 = 230.0;
const TOP: f64 = 1.6 * LINE;
const BOTTOM: f64 = TOP + HEIGHT;

/// A picture that is being drawn.
#[derive(Debug)]
pub struct Svg {
    width: f64,
    height: f64,
    label: String,
    /// The SVG elements drawn so far.
    pub body: String,
}

/// The alignment of a text relative to its point.
#[derive(Debug, Clone, Copy)]
pub enum Anchor {
    /// The text starts at the point.
    Start,
    /// The text is centred on the point.
    Middle,
    /// The text ends at the point.
    End,
}

impl Svg {
    /// Returns an empty picture. `label` describes it for screen readers.
    pub fn new(width: f64, height: f64, label: &str) -> Self {
        Self { width, height, label: escape(label), body: String::new() }
    }

    /// Draws a rectangle with attributes, and with a tooltip unless `title` is empty.
    pub fn rect(&mut self, x: f64, y: f64, width: f64, height: f64, attributes: &str, title: &str) {
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

    /// Draws a line with the CSS class `class`.
    pub fn line(&mut self, from: (f64, f64), to: (f64, f64), class: &str) {
        let ((x1, y1), (x2, y2)) = (from, to);
        let _ = write!(
            self.body,
            r#"<line x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}" class="{class}"/>"#
        );
    }

    /// Draws a text that is already escaped.
    pub fn text(&mut self, x: f64, y: f64, anchor: Anchor, class: &str, text: &str) {
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

    /// Draws horizontal grid lines from `left` to `right` at the values `ticks`, with each value to the left of its
    /// line.
    pub fn grid(&mut self, ticks: &[f64], (left, right): (f64, f64), y: impl Fn(f64) -> f64) {
        for tick in ticks {
            self.line((left, y(*tick)), (right, y(*tick)), "grid");
            self.text(left - 8.0, y(*tick) + 4.0, Anchor::End, "tick", &number_of_tick(*tick));
        }
    }

    /// Draws a line through points.
    pub fn polyline(&mut self, points: impl Iterator<Item = (f64, f64)>, class: &str) {
        let points = points.map(|(x, y)| format!("{x:.1},{y:.1}")).collect::<Vec<_>>().join(" ");
        let _ = write!(self.body, r#"<polyline points="{points}" class="line {class}"/>"#);
    }

    /// Returns the SVG of the picture.
    pub fn finish(self) -> String {
        let Self { width, height, label, body } = self;
        format!(
            r#"<svg viewBox="0 0 {width:.0} {height:.0}" style="max-width:{width:.0}px" role="img" aria-label="{label}">{body}</svg>"#
        )
    }
}

/// One bar of a [`bars`] plot.
#[derive(Debug)]
pub struct Bar {
    /// The name of the bar.
    pub label: String,
    /// The parts of the bar from left to right: the CSS class that sets the colour, and the length in units of the plot.
    pub parts: Vec<(&'static str, f64)>,
    /// The text after the bar.
    pub text: String,
    /// A limit in units of the plot, which is drawn as a mark.
    pub limit: Option<f64>,
}

/// Returns a plot of horizontal bars, one below the other, with labels on the left. If there are many bars, they are thin,
/// only some of them have labels, and their texts are tooltips.
pub fn bars(label: &str, bars: &[Bar], label_width: f64) -> String {
    const TEXT: f64 = 180.0;
    let (step, gap, every) = match bars.len() {
        0..=8 => (34.0, 8.0, 1),
        9..=32 => (22.0, 6.0, 1),
        33..=128 => (9.0, 2.0, 8),
        many => (2.0f64.max(1200.0 / many as f64), 0.5, many / 16),
    };
    let mut svg = Svg::new(WIDTH, step * bars.len() as f64 + 4.0, label);
    let length = |bar: &Bar| bar.parts.iter().map(|(_, length)| length).sum::<f64>();
    let ends = bars.iter().map(|bar| length(bar).max(bar.limit.unwrap_or(0.0)));
    let largest = ends.fold(f64::MIN_POSITIVE, f64::max);
    let scaled = |length: f64| (WIDTH - label_width - TEXT) * length / largest;
    for (i, bar) in bars.iter().enumerate() {
        let (top, height) = (step * i as f64 + 4.0, step - gap);
        let middle = top + height / 2.0 + 5.0;
        if i % every == 0 {
            svg.text(label_width - 10.0, middle, Anchor::End, "label", &escape(&bar.label));
        }
        let tooltip = if every > 1 { format!("{} {}", bar.label, bar.text) } else { String::new() };
        let mut x = label_width;
        // A bar of one part is always visible. Of several parts, those without a length are not drawn.
        let least = if bar.parts.len() == 1 { 1.0 } else { 0.0 };
        for (class, length) in &bar.parts {
            let width = scaled(*length).max(least);
            svg.rect(x, top, width, height, &format!(r#"class="{class}" rx="2""#), &tooltip);
            x += width;
        }
        if let Some(limit) = bar.limit {
            let mark = label_width + scaled(limit);
            svg.line((mark, top), (mark, top + height), "mark-line");
            x = x.max(mark);
        }
        if every == 1 {
            svg.text(x + 8.0, middle, Anchor::Start, "value", &escape(&bar.text));
        }
    }
    svg.line((label_width, 0.0), (label_width, step * bars.len() as f64), "axis");
    svg.finish()
}

/// Returns a picture with the axes of a plot from `left` to `right`, and horizontal grid lines at `ticks`.
fn scales(
    label: &str,
    (left, right): (f64, f64),
    (x_axis, y_axis): (&str, &str),
    ticks: &[f64],
    y: impl Fn(f64) -> f64,
) -> Svg {
    let mut svg = Svg::new(WIDTH, BOTTOM + 2.8 * LINE, label);
    svg.text(0.0, LINE * 0.8, Anchor::Start, "tick", &escape(y_axis));
    svg.grid(ticks, (left, right), y);
    svg.text((left + right) / 2.0, BOTTOM + 2.4 * LINE, Anchor::Middle, "tick", &escape(x_axis));
    svg.line((left, BOTTOM), (right, BOTTOM), "axis");
    svg
}

/// A line of a [`lines`] plot.
#[derive(Debug)]
pub struct Line<'a> {
    /// The name of the line.
    pub name: &'a str,
    /// The CSS class that sets the colour.
    pub class: &'a str,
    /// The points, ordered from left to right.
    pub points: Vec<(f64, f64)>,
}

/// Returns a plot of lines over x from 0 to 1, with the name of each line at its right end.
pub fn lines(label: &str, axes: (&str, &str), lines: &[Line]) -> String {
    const LEFT: f64 = 46.0;
    const RIGHT: f64 = WIDTH - 150.0;
    let values = lines.iter().flat_map(|line| line.points.iter().map(|(_, y)| *y));
    let largest = values.fold(1.0, f64::max);
    let ticks = ticks(largest, 5);
    let top = ticks.last().copied().unwrap_or(1.0).max(largest);
    let x = |share: f64| LEFT + (RIGHT - LEFT) * share;
    let y = |value: f64| BOTTOM - HEIGHT * value / top;
    let mut svg = scales(label, (LEFT, RIGHT), axes, &ticks, y);
    for share in [0.0, 0.25, 0.5, 0.75, 1.0] {
        svg.text(x(share), BOTTOM + LINE, Anchor::Middle, "tick", &percent(share));
    }
    let mut ends: Vec<(f64, &Line)> = Vec::new();
    for line in lines {
        svg.polyline(line.points.iter().map(|(share, value)| (x(*share), y(*value))), line.class);
        ends.extend(line.points.last().map(|(_, value)| (*value, line)));
    }
    // Names do not overlap, however close the ends of the lines are.
    ends.sort_by(|a, b| b.0.total_cmp(&a.0));
    let mut lowest = f64::NEG_INFINITY;
    for (value, line) in ends {
        let place = (y(value) + 4.0).max(lowest + LINE);
        let name = format!("{} {}", number(value), escape(line.name));
        svg.text(RIGHT + 8.0, place, Anchor::Start, "value", &name);
        lowest = place;
    }
    svg.finish()
}

/// The axes of a [`curves`] plot.
#[derive(Debug, Clone, Copy)]
pub struct Axes<'a> {
    /// The label below the horizontal axis.
    pub x: &'a str,
    /// The label above the vertical axis.
    pub y: &'a str,
    /// Whether the vertical axis begins at 0 instead of the smallest value.
    pub from_zero: bool,
    /// Names of the positions 0, 1, 2, … of the horizontal axis. If it is empty, the axis shows numbers.
    pub places: &'a [String],
}

/// Returns a plot of lines over any x range. Lines with few points have markers. If `diagonal`, a dashed line marks y
/// = x.
pub fn curves(label: &str, axes: Axes<'_>, lines: &[Line<'_>], diagonal: bool) -> String {
    const LEFT: f64 = 58.0;
    const RIGHT: f64 = WIDTH - 16.0;
    let points =
        || lines.iter().flat_map(|line| &line.points).filter(|(x, y)| x.is_finite() && y.is_finite());
    let range = |values: &mut dyn Iterator<Item = f64>| {
        values
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)))
    };
    let (mut left, mut right) = range(&mut points().map(|point| point.0));
    let (mut low, mut high) = range(&mut points().map(|point| point.1));
    if left > right {
        (left, right, low, high) = (0.0, 1.0, 0.0, 1.0);
    }
    if axes.from_zero || diagonal {
        low = low.min(0.0);
    }
    if diagonal {
        (left, right, high) = (0.0, right.max(high), right.max(high));
    }
    let y_ticks = ticks_between(low, high, 5);
    (low, high) = (low.min(y_ticks[0]), high.max(y_ticks[y_ticks.len() - 1]));
    let (width, height) = ((right - left).max(f64::MIN_POSITIVE), (high - low).max(f64::MIN_POSITIVE));
    let x = |value: f64| LEFT + (RIGHT - LEFT) * ((value - left) / width).clamp(0.0, 1.0);
    let y = |value: f64| BOTTOM - HEIGHT * ((value - low) / height).clamp(0.0, 1.0);
    let mut svg = scales(label, (LEFT, RIGHT), (axes.x, axes.y), &y_ticks, y);
    if axes.places.is_empty() {
        let round = ticks_between(left, right, 4).into_iter().filter(|tick| (left..=right).contains(tick));
        let mut places: Vec<f64> = round.collect();
        // A single point may lie between round numbers.
        if places.is_empty() {
            places.push(left);
        }
        for tick in places {
            svg.text(x(tick), BOTTOM + LINE, Anchor::Middle, "tick", &number_of_tick(tick));
        }
    } else {
        let every = axes.places.len().div_ceil(5);
        for (place, name) in axes.places.iter().enumerate().step_by(every) {
            let anchor = if place == 0 { Anchor::Start } else { Anchor::Middle };
            svg.text(x(place as f64), BOTTOM + LINE, anchor, "tick", &short(name, 18));
        }
    }
    if diagonal {
        svg.line((x(low), y(low)), (x(right), y(right)), "diagonal");
    }
    for line in lines {
        let drawn = || line.points.iter().filter(|(x, y)| x.is_finite() && y.is_finite());
        svg.polyline(drawn().map(|(a, b)| (x(*a), y(*b))), line.class);
        for (a, b) in drawn().filter(|_| line.points.len() <= 40) {
            let title = format!("{}: {}", line.name, precise(*b));
            let _ = write!(
                svg.body,
                r#"<circle cx="{:.1}" cy="{:.1}" r="3" class="{}"><title>{}</title></circle>"#,
                x(*a),
                y(*b),
                line.class,
                escape(&title)
            );
        }
    }
    svg.finish()
}

/// Returns about `count` round numbers, at least two, that cover `low..=high`.
fn ticks_between(low: f64, high: f64, count: usize) -> Vec<f64> {
    let high = if high > low { high } else { low + low.abs().max(1e-3) * 0.1 };
    let step = step_of((high - low) / count as f64);
    let (first, last) = ((low / step).floor() as i64, (high / step).ceil() as i64);
    (first..=last).map(|place| place as f64 * step).collect()
}

/// Returns about `count` round numbers from 0 up to `largest`, or just above it.
pub fn ticks(largest: f64, count: usize) -> Vec<f64> {
    let step = step_of(largest / count as f64);
    (0..=(largest / step).ceil() as usize).map(|i| step * i as f64).collect()
}

/// Returns the smallest round number that is at least `rough`.
fn step_of(rough: f64) -> f64 {
    let rough = rough.max(f64::MIN_POSITIVE);
    let power = 10_f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 2.5, 5.0, 10.0].map(|m| m * power).into_iter().find(|step| *step >= rough * 0.999);
    step.unwrap_or(power)
}

/// Formats the value of a tick.
pub fn number_of_tick(tick: f64) -> String {
    match tick {
        tick if tick >= 1000.0 => onefold_base::units::format_count(tick.round() as u64),
        tick if tick.abs() < 0.01 => format!("{}", (tick * 1e6).round() / 1e6),
        tick => format!("{}", (tick * 1e4).round() / 1e4),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_axes_of_a_single_point_have_ticks() {
        let axes = Axes { x: "x", y: "y", from_zero: false, places: &[] };
        for x in [34.0, 0.123_456] {
            let plot = curves("a", axes, &[Line { name: "n", class: "c0", points: vec![(x, 0.5)] }], false);
            let tick = format!(r#"text-anchor="middle" class="tick">{}</text>"#, number_of_tick(x));
            assert!(plot.contains(&tick), "{plot}");
        }
    }

    #[test]
    fn scales_have_round_numbers_up_to_the_largest() {
        assert_eq!(ticks(7.3, 4), [0.0, 2.0, 4.0, 6.0, 8.0]);
        assert_eq!(ticks(1.0, 5), [0.0, 0.2, 0.4, 0.6000000000000001, 0.8, 1.0]);
        assert_eq!(ticks(23_000.0, 4).last(), Some(&30_000.0));
        let between: Vec<String> = ticks_between(0.71, 0.79, 4).into_iter().map(number_of_tick).collect();
        assert_eq!(between, ["0.7", "0.72", "0.74", "0.76", "0.78", "0.8"]);
        assert_eq!(ticks_between(3.0, 3.0, 4).len(), 4);
        assert_eq!(
            ["0", "0.6", "2.5", "30,000", "0.001"],
            [0.0, 0.6000000000000001, 2.5, 30_000.0, 0.001]
                .map(number_of_tick)
                .each_ref()
                .map(String::as_str)
        );
    }

    #[test]
    fn bars_have_parts_and_limits_and_are_thin_if_there_are_many() {
        let bar = |label: &str| Bar {
            label: label.into(),
            parts: vec![("c0", 3.0), ("c1", 1.0)],
            text: "4".into(),
            limit: Some(8.0),
        };
        let few = bars("a", &[bar("x<")], 100.0);
        // A unit is 30 pixels: the limit of 8 is at the end of 240.
        for part in [
            r#"x="100.0" y="4.0" width="90.0""#,
            r#"x="190.0" y="4.0" width="30.0""#,
            r#"x1="340.0""#,
            ">x&lt;<",
        ] {
            assert!(few.contains(part), "{part} {few}");
        }
        assert!(few.contains(r#"class="value">4</text>"#) && !few.contains("<title>"), "{few}");
        let many: Vec<Bar> = (0..40).map(|_| bar("x")).collect();
        let many = bars("a", &many, 100.0);
        assert_eq!(
            (many.matches(r#"class="label""#).count(), many.matches("<title>x 4</title>").count()),
            (5, 80)
        );
    }

    #[test]
    fn plots_contain_no_nan_or_infinity() {
        let none: [Bar; 0] = [];
        let axes = Axes { x: "x", y: "y", from_zero: false, places: &[] };
        let line = |points| Line { name: "<n>", class: "c0", points };
        let days = ["a<".to_owned()];
        let plots = [
            bars("a", &none, 100.0),
            bars(
                "a",
                &[Bar { label: "x".into(), parts: vec![("rows", 0.0)], text: "0".into(), limit: None }],
                100.0,
            ),
            lines("a", ("x", "y"), &[line(vec![(0.0, 1.0), (1.0, 1.0)])]),
            curves("a", axes, &[], false),
            curves("a", axes, &[line(vec![(3.0, 0.5)])], false),
            curves("a", axes, &[line(vec![(0.0, f64::NAN), (2.0, f64::INFINITY)])], true),
            curves("a", Axes { places: &days, ..axes }, &[line(vec![(0.0, 0.5)])], false),
        ];
        for plot in plots {
            assert!(plot.starts_with("<svg") && plot.ends_with("</svg>"), "{plot}");
            assert!(!plot.contains("NaN") && !plot.contains("inf") && !plot.contains("<n>"), "{plot}");
        }
    }
}
