//! Draws a timeline as a single page: without scripts and external files, in light or dark colours as set in
//! the reader's system.

use std::fmt::Write;

use onefold_base::units::{count_of, format_bytes, format_count};
use onefold_page::svg::{Anchor, Svg, number_of_tick, ticks};
use onefold_page::text::{escape, number, percent};
use onefold_page::{document, section};

use super::{Kind, OfRank, OverRanks, RankTimes, Timeline, TracedStep};

/// The style sheet in addition to that of all pages; CSS classes have the names of kinds.
const STYLE: &str = include_str!("style.css");
/// The maximum number of steps that are drawn individually.
const STEPS: usize = 40;
/// Widths in pixels: of a picture, of the lanes' names, and of the margin at the right.
const WIDTH: f64 = 1040.0;
const LEFT: f64 = 66.0;
const RIGHT: f64 = 14.0;

/// A drawing of a time interval.
struct Picture {
    svg: Svg,
    /// The beginning of the interval in microseconds since 1970, and its length in microseconds.
    begin: u64,
    length: f64,
    pixels_per_micro: f64,
    lane: f64,
    /// The height above the lanes, and that down to their end, in pixels.
    top: f64,
    bottom: f64,
}

impl Timeline {
    /// Returns the timeline as a self-contained HTML page; `run` is the name of the run.
    pub fn html(&self, run: &str) -> String {
        let title = escape(&format!("Ranks of {run}"));
        let ranks = self.by_rank();
        let steps: Vec<&[TracedStep]> = self.by_step().collect();
        let body = [
            format!("<h1>{title}</h1>\n{}", facts(self, &ranks)),
            format!("<p class=\"verdict\">{}</p>", verdict(self)),
            section(
                "A step of each rank, on average",
                "Ranks wait for the slowest one. If one rank computes longer than the others, and the others \
                 wait, its tables or its machine are the cause. If all wait for the exchange, it is the network \
                 or the plan; if all wait for input, the reader.",
                &(legend() + &table(&ranks)),
            ),
            section("All traced steps", "A line is where a step begins.", &overview(self, &steps)),
            section("Step by step", &lead(steps.len()), &(legend() + &one_by_one(self, &steps))),
        ];
        document(&title, &format!("{}{STYLE}", onefold_page::STYLE), &body)
    }
}

/// Returns a line about the traced steps and ranks.
fn facts(timeline: &Timeline, ranks: &[OfRank]) -> String {
    let (first, last) = timeline.range();
    let steps = ranks.iter().map(|rank| rank.steps).max().unwrap_or(0);
    let mut facts = format!(
        "{} of {}, from step {} to {}",
        count_of(steps, "step"),
        count_of(timeline.ranks.into(), "rank"),
        format_count(first),
        format_count(last)
    );
    for (number, rank) in ranks.iter().enumerate().filter(|(_, rank)| rank.steps < steps) {
        let _ = write!(facts, " · rank {number} has {} of them", rank.steps);
    }
    format!("<p class=\"facts\">{facts}</p>")
}

/// Returns a summary of the timeline, in a sentence or two.
fn verdict(timeline: &Timeline) -> String {
    let RankTimes { waiting_ms, exchange_ms, compute_ms, all_reduce_ms } = timeline.times();
    let step = [waiting_ms, exchange_ms, compute_ms, all_reduce_ms].iter().map(|time| time.mean).sum::<f64>();
    let share = |time: OverRanks| percent(time.mean / step.max(f64::MIN_POSITIVE));
    let text = format!(
        "A step takes <b>{}</b>. Of that a rank computes <b>{}</b>, and waits {} for the exchange of table \
         rows, {} for the all-reduce and {} for input.",
        millis(step),
        share(compute_ms),
        share(exchange_ms),
        share(all_reduce_ms),
        share(waiting_ms),
    );
    if timeline.ranks == 1 {
        return text;
    }
    let (rank, longest, mean) = (compute_ms.max_rank, millis(compute_ms.max), millis(compute_ms.mean));
    format!("{text} Rank {rank} computes longest: {longest} a step, where the mean is {mean}.")
}

/// Returns a table with the times and bytes of every rank.
fn table(ranks: &[OfRank]) -> String {
    let longest =
        ranks.iter().map(|rank| rank.times_ms.iter().sum::<f64>()).fold(f64::MIN_POSITIVE, f64::max);
    let row = |(place, rank): (usize, &OfRank)| {
        let mut bar = String::new();
        for kind in Kind::ALL {
            let share = 100.0 * rank.times_ms[kind as usize] / longest;
            let _ = write!(bar, "<i class=\"{}\" style=\"width:{share:.2}%\"></i>", kind.name());
        }
        let times: String = rank.times_ms.iter().map(|time| format!("<td>{}</td>", number(*time))).collect();
        let sent: String = rank
            .sent_bytes
            .named()
            .iter()
            .map(|(_, sent)| format!("<td>{}</td>", format_bytes(*sent)))
            .collect();
        let step = number(rank.times_ms.iter().sum());
        format!(
            "<tr><th>{place}</th><td class=\"bar\"><span>{bar}</span></td><td><b>{step}</b></td>{times}{sent}</tr>\n"
        )
    };
    let rows: String = ranks.iter().enumerate().map(row).collect();
    format!(
        "<div class=\"scroll\"><table>\n<thead><tr><th></th><th></th><th colspan=\"5\">milliseconds</th>\
         <th colspan=\"4\">sent to other ranks</th></tr>\n\
         <tr><th>rank</th><th></th><th>step</th><th>compute</th><th>exchange</th><th>all-reduce</th><th>input</th>\
         <th>requests</th><th>answers</th><th>gradients</th><th>dense</th></tr></thead>\n\
         <tbody>\n{rows}</tbody></table></div>\n"
    )
}

fn legend() -> String {
    let entry = |kind: Kind| {
        let text = match kind {
            Kind::Compute => "computes",
            Kind::Exchange => "waits for the exchange: requests, answers, gradients",
            Kind::AllReduce => "waits for the all-reduce: losses, dense gradient",
            Kind::Waiting => "waits for input",
        };
        (kind.name(), text)
    };
    onefold_page::legend(&Kind::ALL.map(entry))
}

fn lead(steps: usize) -> String {
    let scale = "All steps have one scale. A span has its name if there is room; the pointer shows its name, \
                 time and bytes.";
    match steps > STEPS {
        true => format!("The first {STEPS} of {} steps. {scale}", format_count(steps as u64)),
        false => scale.to_owned(),
    }
}

/// Returns the beginning and the end of an interval that contains the steps.
fn stretch(steps: &[TracedStep]) -> (u64, u64) {
    let begin = steps.iter().map(|step| step.began_micros).min().unwrap_or(0);
    (begin, steps.iter().map(TracedStep::ended_micros).max().unwrap_or(begin))
}

/// Draws all steps in one picture.
fn overview(timeline: &Timeline, steps: &[&[TracedStep]]) -> String {
    let interval = stretch(&timeline.steps);
    let label = format!("{} steps over time", steps.len());
    let mut picture = Picture::new(timeline.ranks, interval, interval.1 - interval.0, 20.0, &label);
    let mut free = 0.0;
    for of_step in steps {
        of_step.iter().for_each(|step| picture.step(step, false));
        let x = picture.x(stretch(of_step).0);
        if x >= free {
            let number = format_count(of_step[0].step);
            picture.svg.text(x, 14.0, Anchor::Start, "step", &number);
            free = x + 7.5 * number.len() as f64 + 8.0;
        }
    }
    picture.finish()
}

/// Draws a picture per step.
fn one_by_one(timeline: &Timeline, steps: &[&[TracedStep]]) -> String {
    let shown = &steps[..steps.len().min(STEPS)];
    let longest = shown.iter().map(|step| stretch(step)).map(|(begin, end)| end - begin).max().unwrap_or(1);
    let mut page = String::new();
    for of_step in shown {
        let (begin, end) = stretch(of_step);
        let number = format_count(of_step[0].step);
        let label = format!("Step {number} over time");
        let mut picture = Picture::new(timeline.ranks, (begin, end), longest, 6.0, &label);
        of_step.iter().for_each(|step| picture.step(step, true));
        let (length, svg) = (millis((end - begin) as f64 / 1e3), picture.finish());
        let _ = writeln!(page, "<figure><h3>Step {number} <span>{length}</span></h3>{svg}</figure>");
    }
    page
}

impl Picture {
    /// Creates the picture of the interval from `begin` to `end`, at a scale at which `widest` microseconds have the
    /// whole width. `label` is the text alternative.
    fn new(ranks: u32, (begin, end): (u64, u64), widest: u64, top: f64, label: &str) -> Self {
        let lane = if ranks > 16 { 14.0 } else { 22.0 };
        let bottom = top + f64::from(ranks) * (lane + 4.0);
        let pixels_per_micro = (WIDTH - LEFT - RIGHT) / widest.max(1) as f64;
        let svg = Svg::new(WIDTH, bottom + 22.0, label);
        let length = (end - begin).max(1) as f64;
        let mut picture = Self { svg, begin, length, pixels_per_micro, lane, top, bottom };
        for rank in 0..ranks {
            let y = picture.y(rank) + lane / 2.0 + 4.0;
            picture.svg.text(LEFT - 8.0, y, Anchor::End, "tick", &format!("rank {rank}"));
        }
        picture
    }

    fn x(&self, micros: u64) -> f64 {
        LEFT + (micros - self.begin) as f64 * self.pixels_per_micro
    }

    fn y(&self, rank: u32) -> f64 {
        self.top + f64::from(rank) * (self.lane + 4.0)
    }

    /// Draws a step in its rank's lane; with `named`, spans that are wide enough have labels.
    fn step(&mut self, step: &TracedStep, named: bool) {
        let (y, lane) = (self.y(step.rank), self.lane);
        let of_step = format!("rank {}, step {}", step.rank, format_count(step.step));
        for span in &step.spans {
            let x = self.x(step.began_micros + span.start_micros);
            let length = span.end_micros - span.start_micros;
            let width = length as f64 * self.pixels_per_micro;
            let (kind, label) = (span.name.kind(), span.name.label());
            let (took, start) = (millis(length as f64 / 1e3), millis(span.start_micros as f64 / 1e3));
            let verb = if kind == Kind::Compute { "" } else { "waits for " };
            let title = format!("{verb}{label}: {took}, from {start} on ({of_step})");
            self.svg.rect(x, y, width, lane, &format!("class=\"{}\"", kind.name()), &title);
            // A character of the labels' font is at most 6.5 pixels wide on average.
            if named && lane > 16.0 && width > 6.5 * label.len() as f64 + 6.0 {
                self.svg.text(x + width / 2.0, y + lane / 2.0 + 4.0, Anchor::Middle, "name", label);
            }
        }
        let x = self.x(step.began_micros);
        let sent = step.sent_bytes.named().map(|(kind, sent)| format!("{} {kind}", format_bytes(sent)));
        let (length, sent) = (millis(step.length_micros as f64 / 1e3), sent.join(", "));
        let title = format!("{of_step}: {length}; sent {sent}");
        self.svg.rect(x - 0.8, y - 2.0, 1.6, lane + 4.0, "class=\"border\"", &title);
    }

    /// Adds the time axis, and returns the picture as SVG.
    fn finish(mut self) -> String {
        let (length, bottom) = (self.length / 1e3, self.bottom);
        // A label of the axis is at most 90 pixels wide.
        let labels = (self.length * self.pixels_per_micro / 90.0).max(1.0) as usize;
        for tick in ticks(length, labels).into_iter().filter(|tick| *tick <= length) {
            let x = LEFT + tick * 1e3 * self.pixels_per_micro;
            self.svg.line((x, bottom), (x, bottom + 4.0), "axis");
            let text = format!("{} ms", number_of_tick(tick));
            self.svg.text(x, bottom + 17.0, Anchor::Middle, "tick", &text);
        }
        self.svg.finish()
    }
}

/// Formats milliseconds with about three digits: `0.42 ms`.
fn millis(time: f64) -> String {
    format!("{}\u{202F}ms", number(time))
}
