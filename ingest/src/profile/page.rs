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

impl Stage {
    /// Returns the processor time of each stream, in seconds.
    fn seconds(&self) -> impl Iterator<Item = f64> {
        self.streams.iter().map(Duration::as_secs_f64)
    }

    /// Returns the seconds of the two busiest streams.
    fn busiest(&self) -> [f64; 2] {
        self.seconds().fold([0.0; 2], |[first, second], value| match value {
            value if value > first => [value, first],
            value => [first, second.max(value)],
        })
    }

    /// Returns the interval by which half of the time was spent.
    fn middle(&self) -> usize {
        let all: Duration = self.intervals.iter().sum();
        let mut before = Duration::ZERO;
        let half = |time: &Duration| {
            before += *time;
            2 * before >= all
        };
        self.intervals.iter().position(half).unwrap_or(0)
    }

    /// Adds the streams of another stage.
    fn merge(&mut self, other: &Self) {
        self.streams.extend(&other.streams);
        self.intervals.resize(self.intervals.len().max(other.intervals.len()), Duration::ZERO);
        self.intervals.iter_mut().zip(&other.intervals).for_each(|(sum, time)| *sum += *time);
    }
}

impl Profile {
    /// Implements [`Running::page`](super::Running::page).
    pub(super) fn page(&self, threads: usize) -> String {
        let wall = self.began.elapsed().as_secs_f64();
        let stages = self.stages();
        let measured: f64 = stages.iter().flat_map(Stage::seconds).sum();
        let seconds = cpu_seconds().map_or(measured, |now| measured.max(now - self.began_seconds));
        let shown = shown(&stages, seconds, threads);
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
                &picture(&shown, wall),
            ),
            section(
                "How far stages can be divided",
                &format!(
                    "A stage has streams that can work at the same time. Its busiest stream bounds what more processors can \
                     gain. A stage is serial while only one of its streams has work: if all begin together, for the time \
                     that the busiest one takes longer than the next. The shares are of the {whole:.2} s that {threads} \
                     processors would take."
                ),
                &table(&shown, seconds, whole),
            ),
        ];
        document("Where the time of a build went", STYLE, &body)
    }
}

/// Returns the stages in the order of the times at which they ran, and then the smaller stages together.
fn shown(stages: &[Stage], seconds: f64, threads: usize) -> Vec<Stage> {
    let (mut shown, mut small) =
        (Vec::new(), Stage { name: "smaller stages".to_owned(), ..Stage::default() });
    for stage in stages {
        let is_large = stage.seconds().sum::<f64>() >= SMALLEST_SHARE * seconds
            || stage.busiest()[0] >= SMALLEST_STREAM * seconds / threads as f64;
        if is_large {
            shown.push(stage.clone());
        } else {
            small.merge(stage);
        }
    }
    shown.sort_by_key(Stage::middle);
    shown.push(small);
    shown
}

/// Draws a curve for each stage: the number of processors that it kept busy.
fn picture(stages: &[Stage], wall: f64) -> String {
    let rows: Vec<&Stage> = stages.iter().filter(|stage| !stage.intervals.is_empty()).collect();
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

fn table(stages: &[Stage], seconds: f64, whole: f64) -> String {
    let line = |name: &str, detail: &str, own: f64, cells: &str| {
        format!(
            "<tr><td title=\"{}\">{}</td><td>{own:.2}</td><td>{}</td>{cells}</tr>",
            escape(detail),
            escape(name),
            percent(own / seconds.max(f64::MIN_POSITIVE)),
        )
    };
    let of_stage = |stage: &Stage| {
        let [first, second] = stage.busiest();
        let cells = format!(
            "<td>{}</td><td>{first:.3}</td><td>{}</td><td>{:.3}</td><td>{}</td>",
            stage.seconds().filter(|seconds| *seconds > 0.0).count(),
            percent(first / whole),
            first - second,
            percent((first - second) / whole)
        );
        line(&stage.name, &stage.detail, stage.seconds().sum(), &cells)
    };
    let rest = seconds - stages.iter().flat_map(Stage::seconds).sum::<f64>();
    let detail = "reads and writes of files, and work between the tasks of the engine";
    let rest = line("not measured", detail, rest, &"<td></td>".repeat(5));
    format!(
        "<div class=\"scroll plain\"><table><thead><tr><th>stage</th><th>processor time, s</th><th>share</th>\
         <th>streams</th><th>busiest, s</th><th>of the whole</th><th>serial, s</th><th>of the whole</th></tr></thead>\
         <tbody>{}{rest}</tbody></table></div>",
        stages.iter().map(of_stage).collect::<String>()
    )
}
