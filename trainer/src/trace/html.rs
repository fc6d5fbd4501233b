//! Draws a timeline as a single page: without scripts and external files, in light or dark colours as set in
//! the reader's system.

use std::fmt::Write;

use onefold_base::units::{format_bytes, format_count};
use onefold_page::text::escape;
use onefold_page::{document, section};

use super::{Kind, OfRank, OverRanks, RankTimes, Timeline, TracedStep};

/// The style sheet of the page; CSS classes have the names of kinds.
const STYLE: &str = include_str!("style.css");
/// The maximum number of steps that are drawn individually.
const STEPS: usize = 40;
/// Widths in pixels: of a picture, of the lanes' names, and of the margin at the right.
const WIDTH: f64 = 1040.0;
const LEFT: f64 = 66.0;
const RIGHT: f64 = 14.0;

/// A drawing of a time interval.
struct Picture<'a> {
    timeline: &'a Timeline,
    /// The beginning of the interval in microseconds since 1970.
    begin: u64,
    pixels_per_micro: f64,
    lane: f64,
    /// The height above the lanes in pixels.
    top: f64,
    body: String,
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
        document(&title, STYLE, &body)
    }
}

/// Returns a line about the traced steps and ranks.
fn facts(timeline: &Timeline, ranks: &[OfRank]) -> String {
    let (first, last) = timeline.range();
    let steps = ranks.iter().map(|rank| rank.steps).max().unwrap_or(0);
    let mut facts = format!(
        "{} of {}, from step {} to {}",
        count(steps, "step"),
        count(timeline.ranks.into(), "rank"),
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
    let row = |(number, rank): (usize, &OfRank)| {
        let mut bar = String::new();
        for kind in Kind::ALL {
            let share = 100.0 * rank.times_ms[kind as usize] / longest;
            let _ = write!(bar, "<i class=\"{}\" style=\"width:{share:.2}%\"></i>", kind.name());
        }
        let times: String =
            rank.times_ms.iter().map(|time| format!("<td>{}</td>", number_of_millis(*time))).collect();
        let sent: String = rank
            .sent_bytes
            .named()
            .iter()
            .map(|(_, sent)| format!("<td>{}</td>", format_bytes(*sent)))
            .collect();
        let step = number_of_millis(rank.times_ms.iter().sum());
        format!(
            "<tr><th>{number}</th><td class=\"bar\"><span>{bar}</span></td><td><b>{step}</b></td>{times}{sent}</tr>\n"
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
        format!("<li><i class=\"{}\"></i>{text}</li>", kind.name())
    };
    format!("<ul class=\"legend\">{}</ul>\n", Kind::ALL.map(entry).concat())
}

fn lead(steps: usize) -> String {
    let scale = "All steps have one scale. A name stands in a span that has room for it, and all names, times \
                 and bytes are shown where the pointer rests.";
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
    let (begin, end) = stretch(&timeline.steps);
    let scale = (WIDTH - LEFT - RIGHT) / (end - begin).max(1) as f64;
    let mut picture = Picture::new(timeline, begin, scale, 20.0);
    let mut free = 0.0;
    for of_step in steps {
        of_step.iter().for_each(|step| picture.step(step, false));
        let x = picture.x(stretch(of_step).0);
        if x >= free {
            let number = format_count(of_step[0].step);
            picture.text(x, 14.0, "tick", &number);
            free = x + 7.5 * number.len() as f64 + 8.0;
        }
    }
    picture.finish(end, &format!("{} steps over time", steps.len()))
}

/// Draws a picture per step.
fn one_by_one(timeline: &Timeline, steps: &[&[TracedStep]]) -> String {
    let shown = &steps[..steps.len().min(STEPS)];
    let longest = shown.iter().map(|step| stretch(step)).map(|(begin, end)| end - begin).max().unwrap_or(1);
    let scale = (WIDTH - LEFT - RIGHT) / longest.max(1) as f64;
    let mut page = String::new();
    for of_step in shown {
        let (begin, end) = stretch(of_step);
        let mut picture = Picture::new(timeline, begin, scale, 6.0);
        of_step.iter().for_each(|step| picture.step(step, true));
        let number = format_count(of_step[0].step);
        let svg = picture.finish(end, &format!("Step {number} over time"));
        let length = millis((end - begin) as f64 / 1e3);
        let _ = writeln!(page, "<figure><h3>Step {number} <span>{length}</span></h3>{svg}</figure>");
    }
    page
}

impl<'a> Picture<'a> {
    fn new(timeline: &'a Timeline, begin: u64, pixels_per_micro: f64, top: f64) -> Self {
        let lane = if timeline.ranks > 16 { 14.0 } else { 22.0 };
        let mut picture = Self { timeline, begin, pixels_per_micro, lane, top, body: String::new() };
        for rank in 0..timeline.ranks {
            let y = picture.y(rank) + lane / 2.0 + 4.0;
            let _ = write!(
                picture.body,
                "<text x=\"{}\" y=\"{y:.1}\" class=\"rank\">rank {rank}</text>",
                LEFT - 8.0
            );
        }
        picture
    }

    fn x(&self, micros: u64) -> f64 {
        LEFT + (micros - self.begin) as f64 * self.pixels_per_micro
    }

    fn y(&self, rank: u32) -> f64 {
        self.top + f64::from(rank) * (self.lane + 4.0)
    }

    fn text(&mut self, x: f64, y: f64, class: &str, text: &str) {
        let _ = write!(self.body, "<text x=\"{x:.1}\" y=\"{y:.1}\" class=\"{class}\">{text}</text>");
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
            let _ = write!(
                self.body,
                "<rect x=\"{x:.2}\" y=\"{y:.1}\" width=\"{width:.2}\" height=\"{lane}\" class=\"{}\">\
                 <title>{verb}{label}: {took}, from {start} on ({of_step})</title></rect>",
                kind.name()
            );
            // A character of the labels' font is at most 6.5 pixels wide on average.
            if named && lane > 16.0 && width > 6.5 * label.len() as f64 + 6.0 {
                self.text(x + width / 2.0, y + lane / 2.0 + 4.0, "name", label);
            }
        }
        let x = self.x(step.began_micros);
        let sent = step.sent_bytes.named().map(|(kind, sent)| format!("{} {kind}", format_bytes(sent)));
        let (length, sent) = (millis(step.length_micros as f64 / 1e3), sent.join(", "));
        let _ = write!(
            self.body,
            "<rect x=\"{:.2}\" y=\"{:.1}\" width=\"1.6\" height=\"{:.1}\" class=\"border\">\
             <title>{of_step}: {length}; sent {sent}</title></rect>",
            x - 0.8,
            y - 2.0,
            lane + 4.0
        );
    }

    /// Adds the time axis, which ends at `end`; `label` is the text alternative of the picture.
    fn finish(mut self, end: u64, label: &str) -> String {
        let bottom = self.y(self.timeline.ranks);
        let length = (end - self.begin).max(1) as f64 / 1e3;
        let room = length * 1e3 * self.pixels_per_micro;
        let step = round_step(length * 90.0 / room.max(90.0));
        for tick in (0..).map(|number| f64::from(number) * step).take_while(|tick| *tick <= length) {
            let x = LEFT + tick * 1e3 * self.pixels_per_micro;
            let _ = write!(
                self.body,
                "<line x1=\"{x:.1}\" y1=\"{bottom:.1}\" x2=\"{x:.1}\" y2=\"{:.1}\" class=\"axis\"/>",
                bottom + 4.0
            );
            self.text(x, bottom + 17.0, "time", &format!("{} ms", (tick * 1e3).round() / 1e3));
        }
        let (height, body) = (bottom + 22.0, self.body);
        format!("<svg viewBox=\"0 0 {WIDTH} {height:.0}\" role=\"img\" aria-label=\"{label}\">{body}</svg>")
    }
}

/// Returns the smallest round number that is at least `rough`: 1, 2 or 5 times a power of ten.
fn round_step(rough: f64) -> f64 {
    let power = 10_f64.powf(rough.log10().floor());
    [1.0, 2.0, 5.0, 10.0].map(|m| m * power).into_iter().find(|step| *step >= rough).unwrap_or(10.0 * power)
}

/// Returns a count with its noun, such as "1 step" or "11 steps".
fn count(count: u64, one: &str) -> String {
    onefold_base::units::count_of(count, one)
}

/// Formats milliseconds with about three digits: `0.42 ms`.
fn millis(time: f64) -> String {
    format!("{}\u{202F}ms", number_of_millis(time))
}

fn number_of_millis(time: f64) -> String {
    match time {
        time if time >= 1000.0 => format_count(time.round() as u64),
        time if time >= 99.95 => format!("{time:.0}"),
        time if time >= 9.995 => format!("{time:.1}"),
        time => format!("{time:.2}"),
    }
}

fn percent(share: f64) -> String {
    let percent = 100.0 * share;
    let digits = usize::from(percent > 0.0 && percent < 9.95);
    format!("{percent:.digits$}\u{202F}%")
}
