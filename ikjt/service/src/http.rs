//! The HTTP endpoints of a service: a status page, metrics, and the status in JSON.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;

use axum::Router;
use axum::extract::{Query, Request, State};
use axum::http::header::{AUTHORIZATION, CONTENT_TYPE, REFRESH};
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use onefold_base::units::{format_bytes, format_count};
use onefold_ikjt::StageFigures;
use onefold_ikjt::cache::CacheFigures;
use onefold_page::svg::{Bar, bars};
use onefold_page::text::{escape, percent};
use onefold_page::{STYLE, document, section};
use serde::Deserialize;

use crate::messages::{Status, WorkerState};
use crate::rates::{ClientRate, WorkerRate};
use crate::security::{Guard, Proof};

/// The style of the status page's tables, in addition to the style of all pages.
const TABLES: &str = "table{border-collapse:collapse;width:100%;font-size:.9rem}\
    th,td{text-align:right;padding:.25rem .6rem;border-bottom:1px solid var(--line)}\
    th:first-child,td:first-child{text-align:left}td:first-child{font-family:monospace}\n";

/// The content type of metrics.
const METRICS: &str = "text/plain; version=0.0.4";

/// The interval in seconds at which a browser reloads the page.
const REFRESH_SECONDS: &str = "2";

/// Returns the pages of a service. `status` returns its current status. If the service has a token, requests must
/// send it in a header or as `?token=…`.
pub(crate) fn routes(proof: &Proof, status: impl Fn() -> Status + Clone + Send + Sync + 'static) -> Router {
    let (of_page, of_metrics, of_json) = (status.clone(), status.clone(), status);
    let html = [(CONTENT_TYPE, "text/html; charset=utf-8"), (REFRESH, REFRESH_SECONDS)];
    Router::new()
        .route("/", get(async move || (html, page(&of_page()))))
        .route("/metrics", get(async move || ([(CONTENT_TYPE, METRICS)], metrics(&of_metrics()))))
        .route("/status.json", get(async move || axum::Json(of_json())))
        .layer(from_fn_with_state(Arc::new(proof.guard()), guarded))
        .route("/healthz", get(async || "ok\n"))
}

/// Returns the pages of a worker: its metrics, and whether it takes more work.
pub(crate) fn worker_routes(
    proof: &Proof,
    state: impl Fn() -> WorkerState + Clone + Send + Sync + 'static,
) -> Router {
    let (of_metrics, of_health) = (state.clone(), state);
    let metrics = move || {
        let mut metrics = Metrics::default();
        metrics.add_workers(&[(None, &of_metrics())]);
        metrics.0
    };
    let health = move || match of_health().draining {
        false => (StatusCode::OK, "ok\n"),
        true => (StatusCode::SERVICE_UNAVAILABLE, "draining\n"),
    };
    Router::new()
        .route("/metrics", get(async move || ([(CONTENT_TYPE, METRICS)], metrics())))
        .layer(from_fn_with_state(Arc::new(proof.guard()), guarded))
        .route("/healthz", get(async move || health()))
}

#[derive(Deserialize)]
struct Token {
    token: Option<String>,
}

async fn guarded(
    State(guard): State<Arc<Guard>>,
    Query(Token { token }): Query<Token>,
    headers: HeaderMap,
    request: Request,
    next: Next,
) -> Response {
    let header = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok()).map(str::to_owned);
    match guard.role(header.or(token.map(|token| format!("Bearer {token}"))).as_deref()) {
        Some(_) => next.run(request).await,
        None => (StatusCode::UNAUTHORIZED, "give the service's token as `?token=…`\n").into_response(),
    }
}

/// Returns the status page.
fn page(status: &Status) -> String {
    let lead = format!(
        "Onefold {}, up {}. {}",
        escape(&status.version),
        duration(status.uptime_seconds),
        status.limit.explain()
    );
    let style = format!("{STYLE}{TABLES}");
    let body = [
        format!("<h1>Preprocessing service</h1>\n<p>{lead}</p>"),
        clients(status),
        workers(status),
        stages(&status.worker_rates),
        datasets(status),
    ];
    document("Onefold preprocessing service", &style, &body)
}

fn duration(seconds: f64) -> String {
    let seconds = seconds as u64;
    match (seconds / 3600, seconds / 60 % 60) {
        (0, 0) => format!("{seconds} s"),
        (0, minutes) => format!("{minutes} min"),
        (hours, minutes) => format!("{hours} h {minutes} min"),
    }
}

fn table(heads: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let row = |cells: Vec<String>| {
        let cells: String = cells.iter().map(|cell| format!("<td>{}</td>", escape(cell))).collect();
        format!("<tr>{cells}</tr>\n")
    };
    let heads: String = heads.iter().map(|head| format!("<th>{head}</th>")).collect();
    format!("<table>\n<tr>{heads}</tr>\n{}</table>", rows.map(row).collect::<String>())
}

fn clients(status: &Status) -> String {
    let rows = status.clients.iter().zip(&status.client_rates).map(|(client, rate)| {
        vec![
            client.dataset.clone(),
            client.job.get(..8).unwrap_or(&client.job).to_owned(),
            format_count(rate.samples_per_second as u64),
            format!("{}/s", format_bytes(rate.bytes_per_second as u64)),
            percent(rate.waiting_share),
            format_count(client.samples),
        ]
    });
    let heads = ["dataset", "job", "samples/s", "bytes", "waiting", "samples"];
    let lead = "Jobs of equal names read the same batches, which are computed once. Waiting is the share of the time in \
                which a trainer has no batch.";
    section("Clients", lead, &table(&heads, rows))
}

fn workers(status: &Status) -> String {
    let rows = status.workers.iter().zip(&status.worker_rates).map(|(worker, rate)| {
        let draining = if worker.draining { " (draining)" } else { "" };
        vec![
            format!("{}{draining}", worker.address),
            format!("{:.1} of {}", rate.busy_threads, worker.threads),
            worker.blocks.to_string(),
            format_count(rate.samples_computed_per_second as u64),
            format!("{}/s", format_bytes(rate.bytes_sent_per_second as u64)),
            percent(rate.shared_share),
            format_bytes(worker.figures.bytes_kept + worker.figures.cache.cached_bytes),
            format_bytes(worker.figures.cache.cached_bytes_on_disk),
            hits(&worker.figures.cache),
        ]
    });
    let heads = [
        "worker",
        "busy threads",
        "blocks",
        "samples/s",
        "sent",
        "shared",
        "in memory",
        "on disk",
        "cache hits",
    ];
    let lead = format!(
        "{} are wanted. {} leases so far. Shared is the part of what a worker sends that it had computed for another \
         client, or in an epoch before. Cache hits are blocks of batches, decoded columns and encoded columns.",
        status.wanted_workers,
        format_count(status.leases)
    );
    section("Workers", &lead, &table(&heads, rows))
}

/// Formats the numbers of cache hits: blocks, decoded columns, encoded columns.
fn hits(cache: &CacheFigures) -> String {
    let CacheFigures { block_hits, decoded_hits, encoded_hits, .. } = *cache;
    [block_hits, decoded_hits, encoded_hits].map(format_count).join(" / ")
}

/// Returns the section about the time that workers spend in each stage.
fn stages(rates: &[WorkerRate]) -> String {
    let all = rates.iter().fold(StageFigures::default(), |all, rate| all.and(&rate.stages));
    let bar = |(label, seconds): (&'static str, f64)| Bar {
        label: label.to_owned(),
        parts: vec![("folded", seconds)],
        text: format!("{seconds:.2}"),
        limit: None,
    };
    let plot = bars("Threads by stage", &all.by_stage().map(bar), 110.0);
    section(
        "Stages",
        "Threads of all workers that are busy with each stage, on average over the last seconds.",
        &plot,
    )
}

fn datasets(status: &Status) -> String {
    if status.datasets.is_empty() {
        return String::new();
    }
    let rows = status.datasets.iter().map(|(name, location)| vec![name.clone(), location.clone()]);
    section("Datasets", "Clients may name these.", &table(&["name", "location"], rows))
}

/// Reads a number from the state of a worker.
type Count = fn(&WorkerState) -> f64;

/// The counters of workers: name, help, value.
const COUNTERS: &[(&str, &str, Count)] = &[
    ("batches_computed_total", "Batches that were computed.", |w| w.figures.batches_computed as f64),
    ("samples_computed_total", "Samples of them.", |w| w.figures.samples_computed as f64),
    ("batches_sent_total", "Batches that were sent.", |w| w.figures.batches_sent as f64),
    ("bytes_sent_total", "Bytes of them.", |w| w.figures.bytes_sent as f64),
    ("block_hits_total", "Blocks of batches that the cache had.", |w| w.figures.cache.block_hits as f64),
    ("decoded_hits_total", "Columns that need not be decoded.", |w| w.figures.cache.decoded_hits as f64),
    ("encoded_hits_total", "Columns that need not be fetched.", |w| w.figures.cache.encoded_hits as f64),
    ("disk_hits_total", "Hits of all kinds on disk.", |w| w.figures.cache.disk_hits as f64),
    ("failures_total", "Requests that were answered with an error.", |w| w.figures.failures as f64),
    ("cpu_seconds_total", "Processor time of the worker.", |w| w.figures.cpu_seconds),
];

/// The gauges of workers: name, help, value.
const GAUGES: &[(&str, &str, Count)] = &[
    ("kept_bytes", "Bytes of batches that wait for clients.", |w| w.figures.bytes_kept as f64),
    ("cached_bytes", "Bytes of the cache in memory.", |w| w.figures.cache.cached_bytes as f64),
    ("cached_bytes_on_disk", "Bytes of the cache on disk.", |w| w.figures.cache.cached_bytes_on_disk as f64),
    ("blocks", "Blocks that clients read or wait for.", |w| w.blocks as f64),
];

/// The dataset label for clients that read a location without a name. They share one label, because the number of
/// locations is unbounded.
const UNNAMED: &str = "(not named by the master)";

/// Formats the labels of a metric.
fn labels<'a>(labels: impl IntoIterator<Item = &'a (&'static str, String)>) -> String {
    let label = |(name, value): &(&str, String)| format!("{name}=\"{}\"", quoted(value));
    let labels: Vec<String> = labels.into_iter().map(label).collect();
    if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) }
}

/// Metrics in the text format of Prometheus.
#[derive(Default)]
struct Metrics(String);

impl Metrics {
    /// Adds a metric with its labels and values.
    fn add(&mut self, kind: &str, name: &str, help: &str, values: impl IntoIterator<Item = (String, f64)>) {
        let _ = writeln!(self.0, "# HELP onefold_serve_{name} {help}\n# TYPE onefold_serve_{name} {kind}");
        for (labels, value) in values {
            let _ = writeln!(self.0, "onefold_serve_{name}{labels} {value}");
        }
    }

    /// Adds the metrics of workers, with the label of each worker, if it has one.
    fn add_workers(&mut self, workers: &[(Option<(&'static str, String)>, &WorkerState)]) {
        for (kind, metrics) in [("counter", COUNTERS), ("gauge", GAUGES)] {
            for (name, help, of) in metrics {
                self.add(kind, name, help, workers.iter().map(|(label, worker)| (labels(label), of(worker))));
            }
        }
        let stages = workers.iter().flat_map(|(label, worker)| {
            worker.figures.stages.by_stage().map(|(stage, seconds)| {
                let stage = ("stage", stage.to_owned());
                (labels(label.iter().chain([&stage])), seconds)
            })
        });
        self.add("counter", "stage_seconds_total", "Time of the threads in each stage.", stages);
    }
}

/// Returns the metrics of a service.
fn metrics(status: &Status) -> String {
    let mut metrics = Metrics::default();
    for (kind, name, help, value) in [
        ("counter", "leases_total", "Blocks that were assigned to workers.", status.leases),
        ("counter", "retries_total", "Requests that clients repeated after a failure.", status.retries),
        ("counter", "second_requests_total", "Requests to a second worker.", status.second_requests),
        ("gauge", "workers", "Workers that run.", status.workers.len() as u64),
        ("gauge", "wanted_workers", "Workers that should run.", status.wanted_workers as u64),
        ("gauge", "clients", "Clients that read.", status.clients.len() as u64),
    ] {
        metrics.add(kind, name, help, [(String::new(), value as f64)]);
    }
    let label = |worker: &WorkerState| Some(("worker", worker.address.clone()));
    let workers: Vec<_> = status.workers.iter().map(|worker| (label(worker), worker)).collect();
    metrics.add_workers(&workers);
    let mut datasets = BTreeMap::<&str, Vec<&ClientRate>>::new();
    for (client, rate) in status.clients.iter().zip(&status.client_rates) {
        let named = status.datasets.iter().find(|(_, location)| **location == client.dataset);
        datasets.entry(named.map_or(UNNAMED, |(name, _)| name.as_str())).or_default().push(rate);
    }
    let of = |of: fn(&[&ClientRate]) -> f64| {
        let label = |dataset: &str| labels(&[("dataset", dataset.to_owned())]);
        datasets.iter().map(|(dataset, rates)| (label(dataset), of(rates))).collect::<Vec<_>>()
    };
    metrics.add("gauge", "dataset_clients", "Clients that read a dataset.", of(|rates| rates.len() as f64));
    metrics.add(
        "gauge",
        "dataset_samples_per_second",
        "Samples that clients of a dataset receive.",
        of(|rates| rates.iter().map(|rate| rate.samples_per_second).sum()),
    );
    metrics.add(
        "gauge",
        "dataset_waiting_share",
        "Time in which a client of a dataset waits for a batch, in the mean.",
        of(|rates| rates.iter().map(|rate| rate.waiting_share).sum::<f64>() / rates.len() as f64),
    );
    metrics.0
}

/// Escapes the value of a label.
fn quoted(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use onefold_ikjt::service::protocol::ClientState;

    use super::*;
    use crate::messages::WorkerFigures;

    fn worker() -> WorkerState {
        WorkerState {
            address: "10.0.0.2:7071".to_owned(),
            process: "process".to_owned(),
            same_bytes: 1,
            threads: 4,
            memory_limit_bytes: 1 << 30,
            blocks: 0,
            draining: false,
            figures: WorkerFigures::default(),
        }
    }

    #[test]
    fn names_from_outside_are_escaped() {
        let mut status = Status::default();
        status.datasets.insert("a".to_owned(), "<script>".to_owned());
        assert!(page(&status).contains("&lt;script&gt;") && !page(&status).contains("<script>"));
        assert_eq!(quoted("a\"b\\c"), "a\\\"b\\\\c");
    }

    #[test]
    fn labels_do_not_grow_with_clients_and_their_locations() {
        let client = |number: u64| {
            let dataset = if number.is_multiple_of(2) {
                "s3://bucket/clicks".to_owned()
            } else {
                format!("/data/{number}")
            };
            ClientState { client: number.to_string(), dataset, ..ClientState::default() }
        };
        let status = |clients: u64| Status {
            datasets: [("clicks".to_owned(), "s3://bucket/clicks".to_owned())].into(),
            clients: (0..clients).map(client).collect(),
            client_rates: (0..clients)
                .map(|_| ClientRate { samples_per_second: 2.0, ..ClientRate::default() })
                .collect(),
            ..Status::default()
        };
        let many = metrics(&status(1000));
        assert_eq!(many.lines().count(), metrics(&status(2)).lines().count());
        assert!(
            many.contains("onefold_serve_dataset_samples_per_second{dataset=\"clicks\"} 1000\n"),
            "{many}"
        );
    }

    #[test]
    fn metrics_include_failures_retries_and_stages() {
        let mut worker = worker();
        (worker.figures.failures, worker.figures.stages.decode_seconds) = (3, 1.5);
        let status = Status { workers: vec![worker], retries: 4, second_requests: 5, ..Status::default() };
        let metrics = metrics(&status);
        for line in [
            "failures_total{worker=\"10.0.0.2:7071\"} 3",
            "stage_seconds_total{worker=\"10.0.0.2:7071\",stage=\"decode\"} 1.5",
            "retries_total 4",
            "second_requests_total 5",
        ] {
            assert!(metrics.contains(&format!("\nonefold_serve_{line}\n")), "{line}: {metrics}");
        }
    }

    #[test]
    fn metrics_are_lines_of_names_and_numbers() {
        for line in metrics(&Status::default()).lines().filter(|line| !line.starts_with('#')) {
            let (name, value) = line.rsplit_once(' ').unwrap();
            assert!(name.starts_with("onefold_serve_") && value.parse::<f64>().is_ok(), "{line}");
        }
    }
}
