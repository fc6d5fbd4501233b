//! The HTML page of a report.

use std::collections::BTreeSet;

use onefold_base::units::{format_bytes, format_count};
use onefold_page::svg::{Axes, Line, curves};
use onefold_page::text::{escape, precise, short};
use onefold_page::{STYLE, document, legend, section};
use serde_json::Value;

use super::{Point, Report, ReportedRun};

/// The CSS classes of the runs' colours.
const COLOURS: [&str; 6] = ["c0", "c1", "c2", "c3", "c4", "c5"];
/// The maximum number of segments in the table of a feature.
const SEGMENTS: usize = 60;

/// Whether lower or higher values of a metric are better.
#[derive(Clone, Copy, PartialEq)]
enum Better {
    Less,
    More,
    Neither,
}

/// Returns a figure as it is shown.
type Shown<'a> = &'a dyn Fn(f64) -> String;

/// The metrics of evaluations, in the order of the tables.
const FIGURES: [(&str, Better); 12] = [
    ("loss", Better::Less),
    ("ne", Better::Less),
    ("auc", Better::More),
    ("calibration", Better::Neither),
    ("rmse", Better::Less),
    ("mae", Better::Less),
    ("r2", Better::More),
    ("deviance", Better::Less),
    ("ranking.gauc", Better::More),
    ("ranking.group_auc", Better::More),
    ("ranking.mrr", Better::More),
    ("base_rate", Better::Neither),
];

impl Report {
    /// Returns the report as a self-contained HTML page.
    pub fn html(&self) -> String {
        let title = match self.runs.as_slice() {
            [run] => format!("Run {}", escape(&run.name)),
            runs => format!("{} runs side by side", runs.len()),
        };
        let body = [
            format!("<h1>{title}</h1>\n{}", self.facts()),
            self.legend(),
            self.results(),
            self.learning(),
            self.days(),
            self.following(),
            self.calibration(),
            self.segments(),
            format!("<footer>Made by Onefold {}.</footer>", env!("CARGO_PKG_VERSION")),
        ];
        document(&title, &format!("{STYLE}section > h3 {{ margin-top: 22px; }}\n"), &body)
    }

    fn facts(&self) -> String {
        let fact = |run: &ReportedRun| {
            let config = &run.description.config;
            let label = config.all_tasks().into_iter().map(|task| task.label).collect::<Vec<_>>().join(", ");
            format!(
                "{}: predicts {}, batches of {}{}",
                escape(&run.name),
                escape(&label),
                format_count(config.train.batch_size as u64),
                if run.summary.is_some() { "" } else { " · not complete yet" }
            )
        };
        let facts = self.runs.iter().map(fact).collect::<Vec<_>>().join("<br>");
        format!("<p class=\"facts\">{facts}</p>")
    }

    fn legend(&self) -> String {
        if self.runs.len() == 1 {
            return String::new();
        }
        let names: Vec<String> = self.runs.iter().map(|run| escape(&run.name)).collect();
        let entries: Vec<(&str, &str)> =
            names.iter().enumerate().map(|(number, name)| (colour(number), name.as_str())).collect();
        legend(&entries)
    }

    /// Returns the table of all metrics.
    fn results(&self) -> String {
        let evaluations: Vec<Option<&Value>> = self.runs.iter().map(ReportedRun::evaluation).collect();
        let summaries: Vec<Option<&Value>> = self.runs.iter().map(|run| run.summary.as_ref()).collect();
        let days: Vec<Option<&Value>> =
            summaries.iter().map(|summary| (*summary)?.get("progressive")).collect();
        let mut rows = Vec::new();
        for (title, all) in [("Held-out samples", &evaluations), ("Days before they were trained on", &days)]
        {
            if all.iter().any(Option::is_some) {
                rows.push(heading(title, self.runs.len()));
                rows.push(row("samples", &numbers(all, "samples"), Better::Neither, &count));
                rows.extend(figure_rows(all));
            }
        }
        rows.push(heading("Training", self.runs.len()));
        let (seconds, bytes) = (|s: f64| format!("{s:.1}"), |bytes: f64| format_bytes(bytes as u64));
        let training: [(&str, &str, Better, Shown<'_>); 10] = [
            ("samples", "samples", Better::Neither, &count),
            ("steps", "steps", Better::Neither, &count),
            ("loss", "loss", Better::Neither, &precise),
            ("parameters", "parameters.embedding", Better::Neither, &count),
            ("table rows in use", "rows.in_use", Better::Neither, &count),
            ("table rows evicted", "rows.evicted", Better::Neither, &count),
            ("step where the loss jumped", "loss_jump.step", Better::Neither, &count),
            ("seconds", "wall_seconds", Better::Less, &seconds),
            ("samples per second", "samples_per_second", Better::More, &count),
            ("largest resident set", "peak_rss_bytes", Better::Neither, &bytes),
        ];
        let of_figure = |(name, path, better, shown)| row(name, &numbers(&summaries, path), better, shown);
        rows.extend(training.map(of_figure));
        let names =
            self.runs.iter().map(|run| format!("<th>{}</th>", short(&run.name, 32))).collect::<String>();
        let table = format!(
            "<div class=\"scroll plain\"><table><thead><tr><th></th>{names}</tr></thead><tbody>{}</tbody></table></div>",
            rows.concat()
        );
        let lead = "NE is the cross-entropy divided by that of always predicting the base rate: below 1 the model knows \
                    more than that. Calibration is the sum of the predictions divided by that of the labels. Held-out \
                    figures are those of the last evaluation.";
        section("Results", lead, &table)
    }

    /// Returns the learning curves.
    fn learning(&self) -> String {
        let figure = |name: &str, title: &str, points: &dyn Fn(&ReportedRun) -> &[Point]| {
            let lines: Vec<Line<'_>> = self.lines(|run| {
                let points = points(run).iter();
                points.filter_map(|point| Some((point.samples, at(&point.figures, name)?))).collect()
            });
            if lines.is_empty() {
                return String::new();
            }
            let axes = Axes { x: "samples", y: name, from_zero: false, places: &[] };
            format!("<figure><h3>{title}</h3>{}</figure>", curves(title, axes, &lines, false))
        };
        let plots = [
            figure("ne", "Training: normalized entropy", &|run| &run.training),
            figure("ne", "Held out: normalized entropy", &|run| &run.evaluations),
            figure("rmse", "Training: RMSE", &|run| &run.training),
            figure("rmse", "Held out: RMSE", &|run| &run.evaluations),
            figure("auc", "Held out: AUC", &|run| &run.evaluations),
            figure("ranking.gauc", "Held out: AUC within groups", &|run| &run.evaluations),
        ];
        let lead = "Figures of training are of predictions made before each step, since the log line before; those of \
                    held-out samples are of the first task.";
        section("Learning", lead, &format!("<div class=\"pair\">{}</div>", plots.concat()))
    }

    /// Returns the curves of each day, evaluated before it was trained on.
    fn days(&self) -> String {
        fn days(run: &ReportedRun) -> impl Iterator<Item = (&str, &Value)> {
            run.days.iter().map(|(name, figures)| (name.as_str(), figures))
        }
        if self.runs.iter().all(|run| run.days.is_empty()) {
            return String::new();
        }
        let plot = |figure: &str, title: &str| self.by_place(figure, title, ("day", false), days);
        let plots = [
            plot("ne", "Normalized entropy by day"),
            plot("auc", "AUC by day"),
            plot("calibration", "Calibration by day"),
            plot("rmse", "RMSE by day"),
        ];
        let lead = "The model of each evening on the samples of the next day, before it is trained on them: the figures \
                    that a model has in service.";
        section("Day by day", lead, &format!("<div class=\"pair\">{}</div>", plots.concat()))
    }

    /// Returns the plot of labels over predictions.
    fn calibration(&self) -> String {
        let lines = self.lines(|run| {
            let bins = run.evaluation().and_then(|figures| figures["calibration_bins"].as_array());
            let point = |bin: &Value| Some((bin["prediction"].as_f64()?, bin["label"].as_f64()?));
            bins.into_iter().flatten().filter_map(point).collect()
        });
        if lines.is_empty() {
            return String::new();
        }
        let axes = Axes { x: "mean prediction", y: "mean label", from_zero: true, places: &[] };
        let plot = curves("mean label by mean prediction", axes, &lines, true);
        let lead = "Held-out samples in bins of equal weight, from low predictions to high ones. On the dashed line \
                    predictions are as high as labels; below it they are too high.";
        section("Calibration", lead, &format!("<div class=\"pair\"><figure>{plot}</figure></div>"))
    }

    /// Returns the tables of metrics by segment.
    fn segments(&self) -> String {
        let features: BTreeSet<&String> = self
            .runs
            .iter()
            .filter_map(|run| run.evaluation()?["segments"].as_object())
            .flat_map(|f| f.keys())
            .collect();
        if features.is_empty() {
            return String::new();
        }
        let tables: String = features.into_iter().map(|feature| self.segment_table(feature)).collect();
        let lead = "Held-out samples by the id of a feature, the first task's figures; most samples first.";
        section("Segments", lead, &tables)
    }

    fn segment_table(&self, feature: &str) -> String {
        let figures = |run: &'_ ReportedRun, segment: &str| {
            let by_task = run.evaluation()?["segments"].get(feature)?.get(segment)?.as_object()?;
            let first = run.description.config.all_tasks().into_iter().next()?.label;
            by_task.get(&first).cloned()
        };
        let of_run = |run: &ReportedRun| {
            let segments = run.evaluation().and_then(|eval| eval["segments"].get(feature)?.as_object());
            segments.into_iter().flat_map(|segments| segments.keys().cloned()).collect::<Vec<_>>()
        };
        let segments: BTreeSet<String> = self.runs.iter().flat_map(of_run).collect();
        let samples = |segment: &String| {
            let of = self.runs.iter().filter_map(|run| at(&figures(run, segment)?, "samples"));
            of.fold(0.0, f64::max)
        };
        let mut segments: Vec<(f64, String)> =
            segments.into_iter().map(|name| (samples(&name), name)).collect();
        segments.sort_by(|a, b| b.0.total_cmp(&a.0).then_with(|| a.1.cmp(&b.1)));
        let left_out = segments.len().saturating_sub(SEGMENTS);
        let names = ["ne", "auc", "calibration", "rmse"];
        let shown: Vec<&str> = names
            .into_iter()
            .filter(|name| {
                let any = |run: &ReportedRun| {
                    segments.iter().any(|(_, s)| figures(run, s).is_some_and(|f| at(&f, name).is_some()))
                };
                self.runs.iter().any(any)
            })
            .collect();
        let head = shown.iter().map(|name| {
            let width = self.runs.len();
            format!("<th class=\"over edge\" colspan=\"{width}\">{name}</th>")
        });
        let runs = shown.iter().flat_map(|_| self.runs.iter().enumerate()).map(|(number, run)| {
            format!("<th{}>{}</th>", if number == 0 { " class=\"edge\"" } else { "" }, short(&run.name, 16))
        });
        let line = |(samples, segment): &(f64, String)| {
            let cells = shown.iter().map(|name| {
                let of = |run: &ReportedRun| figures(run, segment).and_then(|figures| at(&figures, name));
                let values: Vec<Option<f64>> = self.runs.iter().map(of).collect();
                cells(&values, better_of(name), &precise, true)
            });
            let cells: String = cells.collect();
            format!("<tr><td>{}</td><td>{}</td>{cells}</tr>", escape(segment), count(*samples))
        };
        let lines: String = segments.iter().take(SEGMENTS).map(line).collect();
        let note = match left_out {
            0 => String::new(),
            more => format!(
                "<p class=\"facts\">{} more segments are in <code>metrics.jsonl</code>.</p>",
                count(more as f64)
            ),
        };
        format!(
            "<h3>{}</h3><div class=\"scroll\"><table><thead><tr><th></th><th>samples</th>{}</tr><tr><th></th><th></th>{}</tr>\
             </thead><tbody>{lines}</tbody></table></div>{note}",
            escape(feature),
            head.collect::<String>(),
            runs.collect::<String>()
        )
    }

    /// Returns the curves of a metric over places with names, such as days; empty if no run has the metric. `points`
    /// returns the names and metrics of a run.
    pub(super) fn by_place<'r, P: Iterator<Item = (&'r str, &'r Value)>>(
        &'r self,
        figure: &str,
        title: &str,
        (axis, from_zero): (&str, bool),
        points: impl Fn(&'r ReportedRun) -> P,
    ) -> String {
        let names: BTreeSet<&str> = self.runs.iter().flat_map(&points).map(|(name, _)| name).collect();
        let places: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let lines = self.lines(|run| {
            let point = |(name, figures): (&str, &Value)| {
                let place = names.iter().position(|known| *known == name)?;
                Some((place as f64, at(figures, figure)?))
            };
            points(run).filter_map(point).collect()
        });
        if lines.is_empty() {
            return String::new();
        }
        let axes = Axes { x: axis, y: figure, from_zero, places: &places };
        format!("<figure><h3>{title}</h3>{}</figure>", curves(title, axes, &lines, false))
    }

    /// Returns a line for every run with points.
    fn lines<'r>(&'r self, points: impl Fn(&'r ReportedRun) -> Vec<(f64, f64)>) -> Vec<Line<'r>> {
        let runs = self.runs.iter().enumerate();
        let lines =
            runs.map(|(number, run)| Line { name: &run.name, class: colour(number), points: points(run) });
        lines.filter(|line| !line.points.is_empty()).collect()
    }
}

fn colour(run: usize) -> &'static str {
    COLOURS[run % COLOURS.len()]
}

fn count(value: f64) -> String {
    format_count(value.round() as u64)
}

fn better_of(figure: &str) -> Better {
    FIGURES.iter().find(|(name, _)| *name == figure).map_or(Better::Neither, |(_, better)| *better)
}

/// Returns the number at a path, such as `ranking.gauc`.
fn at(figures: &Value, path: &str) -> Option<f64> {
    path.split('.').try_fold(figures, |figures, key| figures.get(key))?.as_f64()
}

fn numbers(all: &[Option<&Value>], path: &str) -> Vec<Option<f64>> {
    all.iter().map(|figures| figures.and_then(|figures| at(figures, path))).collect()
}

/// Returns the rows of all metrics that at least one run has, including ranking metrics at each K.
fn figure_rows(all: &[Option<&Value>]) -> Vec<String> {
    let fixed = FIGURES.iter().map(|(name, better)| ((*name).to_owned(), *better));
    let at_k: BTreeSet<String> = all
        .iter()
        .flatten()
        .filter_map(|figures| figures["ranking"].as_object())
        .flat_map(|ranking| ranking.keys().filter(|name| name.contains("_at_")).cloned())
        .collect();
    let at_k = at_k.into_iter().map(|name| (format!("ranking.{name}"), Better::More));
    let named = fixed.chain(at_k).map(|(name, better)| {
        let shown = name.trim_start_matches("ranking.").to_owned();
        row(&shown, &numbers(all, &name), better, &precise)
    });
    named.collect()
}

fn heading(title: &str, runs: usize) -> String {
    format!("<tr class=\"group\"><td colspan=\"{}\">{title}</td></tr>", runs + 1)
}

/// Returns a row of a table, or nothing if no run has the metric.
fn row(name: &str, values: &[Option<f64>], better: Better, shown: Shown<'_>) -> String {
    if values.iter().all(Option::is_none) {
        return String::new();
    }
    format!("<tr><td class=\"member\">{name}</td>{}</tr>", cells(values, better, shown, false))
}

/// Returns the cells of the runs' values, with an edge before the first cell if `edge`; the best of several
/// values is emphasized.
fn cells(values: &[Option<f64>], better: Better, shown: Shown<'_>, edge: bool) -> String {
    let known = || values.iter().flatten().copied();
    let best = match better {
        _ if known().count() < 2 => None,
        Better::Less => known().reduce(f64::min),
        Better::More => known().reduce(f64::max),
        Better::Neither => None,
    };
    let cell = |(number, value): (usize, &Option<f64>)| {
        let class = match (edge && number == 0, value.is_some() && *value == best) {
            (true, true) => "best edge",
            (true, false) => "edge",
            (false, true) => "best",
            (false, false) => "",
        };
        format!("<td class=\"{class}\">{}</td>", value.map_or_else(|| "–".to_owned(), shown))
    };
    values.iter().enumerate().map(cell).collect()
}
