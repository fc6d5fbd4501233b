//! Renders a profile as an HTML page.

use std::time::Duration;

use onefold_base::process::cpu_seconds;
use onefold_page::svg::{Anchor, Svg, ticks};
use onefold_page::text::{escape, percent};
use onefold_page::{STYLE, document, section};

use super::{INTERVAL, Profile, Stage};

/// The fraction of the total processor time below which a stage is shown among the smaller stages, unless it reaches
/// [`SMALLEST_STREAM`].
const SMALLEST_SHARE: f64 = 0.002;
/// The fraction of the time per processor that the busiest stream of a stage must reach for the stage to be shown
/// separately.
const SMALLEST_STREAM: f64 = 0.01;
/// The number of points of a curve.
const POINTS: usize = 240;
/// The sizes of the picture, in pixels.
const WIDTH: f64 = 1040.0;
const LABELS: f64 = 290.0;
const ROW: f64 = 34.0;

/// A stage in the form that is shown.
struct Row {
    name: String,
    detail: String,
    streams: usize,
    seconds: f64,
    /// The seconds of the two busiest streams.
    busiest: [f64; 2],
    intervals: Vec<Duration>,
}

impl Profile {
    /// Implements [`Running::page`](super::Running::page).
    pub(super) fn page(&self, threads: usize) -> String {
        let wall = self.began.elapsed().as_secs_f64();
        let (rows, seconds) = self.rows(threads);
        let whole = seconds / threads as f64;
        let lead = format!(
            "{seconds:.1} s of processor time in {wall:.1} s. Divided evenly among {threads} processors that would take \
             {whole:.2} s."
        );
        let body = [
            "<h1>Where the time of a build went</h1>".to_owned(),
            format!("<p class=\"facts\">{lead}</p>"),
            section(
                "When each stage worked",
                "The processors that a stage kept busy, by time. A stage is an operator of the engine with its tasks, or a \
                 part of Onefold's own work.",
                &picture(&rows, wall),
            ),
            section(
                "How far stages can be divided",
                &format!(
                    "A stage has streams that can work at the same time. Its busiest stream bounds what more processors can \
                     gain. A stage is serial while only one of its streams has work: if all begin together, for the time \
                     that the busiest one takes longer than the next. The shares are of the {whole:.2} s that {threads} \
                     processors would take."
                ),
                &table(&rows, seconds, whole),
            ),
        ];
        document("Where the time of a build went", STYLE, &body)
    }

    /// Returns the stages in the order of the times at which they ran, and the total processor time in seconds.
    fn rows(&self, threads: usize) -> (Vec<Row>, f64) {
        let stages = self.stages();
        let measured: f64 = stages.iter().flat_map(|stage| &stage.streams).map(Duration::as_secs_f64).sum();
        let all = cpu_seconds().map_or(measured, |now| measured.max(now - self.began_seconds));
        let (mut rows, mut small) = (Vec::new(), row(&Stage::default()));
        for stage in stages.iter() {
            let row = row(stage);
            let is_shown = row.seconds >= SMALLEST_SHARE * all
                || row.busiest[0] >= SMALLEST_STREAM * all / threads as f64;
            if is_shown {
                rows.push(row);
            } else {
                small.seconds += row.seconds;
                small.streams += row.streams;
                small.busiest = largest(small.busiest.into_iter().chain(row.busiest));
                let length = small.intervals.len().max(row.intervals.len());
                small.intervals.resize(length, Duration::ZERO);
                small.intervals.iter_mut().zip(row.intervals).for_each(|(sum, time)| *sum += time);
            }
        }
        rows.sort_by_key(|row| middle(&row.intervals));
        "smaller stages".clone_into(&mut small.name);
        rows.push(small);
        let rest = Row {
            name: "not measured".to_owned(),
            detail: "reads and writes of files, and work between the tasks of the engine".to_owned(),
            streams: 0,
            seconds: all - measured,
            busiest: [0.0; 2],
            intervals: Vec::new(),
        };
        rows.push(rest);
        (rows, all)
    }
}

fn row(stage: &Stage) -> Row {
    let streams = || stage.streams.iter().map(Duration::as_secs_f64);
    Row {
        name: stage.name.clone(),
        detail: stage.detail.clone(),
        streams: streams().filter(|seconds| *seconds > 0.0).count(),
        seconds: streams().sum(),
        busiest: largest(streams()),
        intervals: stage.intervals.clone(),
    }
}

/// Returns the two largest values.
fn largest(values: impl Iterator<Item = f64>) -> [f64; 2] {
    values.fold([0.0; 2], |[first, second], value| match value {
        value if value > first => [value, first],
        value => [first, second.max(value)],
    })
}

/// Returns the interval by which half of the time was spent.
fn middle(intervals: &[Duration]) -> usize {
    let all: Duration = intervals.iter().sum();
    let mut before = Duration::ZERO;
    let half = |time: &Duration| {
        before += *time;
        2 * before >= all
    };
    intervals.iter().position(half).unwrap_or(0)
}

/// Draws a curve for each stage: the number of processors that it kept busy.
fn picture(rows: &[Row], wall: f64) -> String {
    let rows: Vec<&Row> = rows.iter().filter(|row| !row.intervals.is_empty()).collect();
    let height = ROW * rows.len() as f64;
    let mut svg = Svg::new(WIDTH, height + 24.0, "processors that each stage kept busy, by time");
    let x = |seconds: f64| LABELS + (WIDTH - LABELS - 60.0) * seconds / wall;
    for tick in ticks(wall, 6) {
        svg.line((x(tick), 0.0), (x(tick), height), "grid");
        svg.text(x(tick), height + 18.0, Anchor::Middle, "tick", &format!("{tick} s"));
    }
    for (number, row) in rows.iter().enumerate() {
        let busy = busy(&row.intervals, wall);
        let (most, bottom) = (busy.iter().copied().fold(0.0, f64::max), ROW * (number + 1) as f64);
        svg.text(LABELS - 10.0, bottom - 10.0, Anchor::End, "label", &escape(&row.name));
        for (point, processors) in busy.iter().enumerate() {
            let high = (ROW - 6.0) * processors / most.max(1.0);
            let left = x(wall * point as f64 / POINTS as f64);
            let right = x(wall * (point + 1) as f64 / POINTS as f64);
            let class = format!(r#"class="c{}""#, number % 6);
            svg.rect(left, bottom - high, right - left, high, &class, "");
        }
        svg.line((LABELS, bottom), (WIDTH - 60.0, bottom), "axis");
        svg.text(WIDTH - 52.0, bottom - 10.0, Anchor::Start, "tick", &format!("{most:.1}"));
    }
    format!(
        "<figure>{}</figure><p class=\"facts\">The number on the right is the most processors at a time.</p>",
        svg.finish()
    )
}

/// Returns the number of busy processors at [`POINTS`] points of time.
fn busy(intervals: &[Duration], wall: f64) -> Vec<f64> {
    let mut busy = vec![0.0; POINTS];
    for (number, time) in intervals.iter().enumerate() {
        let at = INTERVAL.as_secs_f64() * number as f64 / wall;
        busy[((at * POINTS as f64) as usize).min(POINTS - 1)] += time.as_secs_f64();
    }
    busy.iter_mut().for_each(|seconds| *seconds /= wall / POINTS as f64);
    busy
}

fn table(rows: &[Row], seconds: f64, whole: f64) -> String {
    let line = |row: &Row| {
        let [first, second] = row.busiest;
        let cells = match row.streams {
            0 => "<td></td><td></td><td></td><td></td><td></td>".to_owned(),
            streams => format!(
                "<td>{streams}</td><td>{first:.3}</td><td>{}</td><td>{:.3}</td><td>{}</td>",
                percent(first / whole),
                first - second,
                percent((first - second) / whole)
            ),
        };
        format!(
            "<tr><td title=\"{}\">{}</td><td>{:.2}</td><td>{}</td>{cells}</tr>",
            escape(&row.detail),
            escape(&row.name),
            row.seconds,
            percent(row.seconds / seconds.max(f64::MIN_POSITIVE)),
        )
    };
    format!(
        "<div class=\"scroll plain\"><table><thead><tr><th>stage</th><th>processor time, s</th><th>share</th>\
         <th>streams</th><th>busiest, s</th><th>of the whole</th><th>serial, s</th><th>of the whole</th></tr></thead>\
         <tbody>{}</tbody></table></div>",
        rows.iter().map(line).collect::<String>()
    )
}
