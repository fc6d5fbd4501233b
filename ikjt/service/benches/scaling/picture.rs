//! The autoscaler's decisions for a trainer whose speed changes, as a picture.

use onefold_page::svg::{Anchor, Svg};
use onefold_serve::simulation::{Scaling, Seen};

/// Samples a second that a worker makes.
const OF_WORKER: f64 = 100e3;

/// Threads of a worker.
const THREADS: usize = 16;

/// What a trainer does for some decisions.
struct Stretch {
    name: &'static str,
    decisions: usize,
    /// Samples a second that it would take.
    wanted: f64,
    /// Samples a second that workers get from storage, all together.
    storage: f64,
}

const STRETCHES: [Stretch; 4] = [
    Stretch { name: "trainer at 1×", decisions: 10, wanted: 250e3, storage: f64::INFINITY },
    Stretch { name: "10×", decisions: 14, wanted: 2500e3, storage: f64::INFINITY },
    Stretch { name: "1×", decisions: 12, wanted: 250e3, storage: f64::INFINITY },
    Stretch {
        name: "10×, but storage gives 600 k samples/s", decisions: 28, wanted: 2500e3, storage: 600e3
    },
];

/// What was before a decision.
#[derive(Debug, Clone, Copy)]
struct Seconds {
    wanted: f64,
    delivered: f64,
    workers: usize,
}

/// The courses of events: workers that are wanted are there at the next decision.
fn events() -> Vec<Seconds> {
    let mut scaler = Scaling::new(1, 64);
    let mut workers = 1;
    let mut events = Vec::new();
    for Stretch { decisions, wanted, storage, .. } in STRETCHES {
        for _ in 0..decisions {
            let delivered = (workers as f64 * OF_WORKER).min(storage).min(wanted);
            events.push(Seconds { wanted, delivered, workers });
            workers = scaler.decide(Seen {
                workers,
                threads: THREADS,
                busy_threads: THREADS as f64 * delivered / OF_WORKER / workers as f64,
                samples_per_second: delivered,
                waiting_share: 1.0 - delivered / wanted,
            });
        }
    }
    events
}

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 400.0;
const LEFT: f64 = 50.0;
const RIGHT: f64 = WIDTH - 50.0;
const TOP: f64 = 64.0;
const BOTTOM: f64 = HEIGHT - 48.0;

/// The most workers that the picture has room for.
const MOST: f64 = 30.0;

/// Readable on a light page and on a dark one.
const STYLE: &str = "<style>\
    text{font:13px system-ui,sans-serif;fill:#333}.tick{font-size:12px}\
    line,polyline,path{fill:none;stroke:#333}.grid{stroke:#ddd}.stretch{stroke:#999;stroke-dasharray:3 4}\
    .line{stroke-width:2;stroke-linejoin:round}.wanted{stroke:#c2570c;stroke-dasharray:7 4}.delivered{stroke:#1f6fb4}\
    .workers{stroke:#4a8f3c}text.wanted{fill:#c2570c}text.delivered{fill:#1f6fb4}text.workers{fill:#4a8f3c}\
    text.wanted,text.delivered,text.workers{stroke:none;font-weight:600}\
    @media(prefers-color-scheme:dark){text{fill:#ccc}line,polyline,path{stroke:#ccc}.grid{stroke:#3a3a3a}\
    .stretch{stroke:#777}.wanted{stroke:#f0954e}.delivered{stroke:#6cb3ee}.workers{stroke:#86c978}\
    text.wanted{fill:#f0954e}text.delivered{fill:#6cb3ee}text.workers{fill:#86c978}}</style>";

/// The picture as an SVG.
pub(crate) fn picture() -> String {
    let events = events();
    let x = |decision: f64| LEFT + (RIGHT - LEFT) * decision / events.len() as f64;
    let y = |workers: f64| BOTTOM - (BOTTOM - TOP) * workers / MOST;
    let mut svg =
        Svg::new(WIDTH, HEIGHT, "Workers that the autoscaler wants, and samples that a trainer gets");
    for tick in (0..=6).map(|tick| 5.0 * f64::from(tick)) {
        svg.line((LEFT, y(tick)), (RIGHT, y(tick)), "grid");
        svg.text(LEFT - 8.0, y(tick) + 4.0, Anchor::End, "tick", &format!("{:.1}", tick * OF_WORKER / 1e6));
        svg.text(RIGHT + 8.0, y(tick) + 4.0, Anchor::Start, "tick", &format!("{tick}"));
    }
    for decision in (0..=events.len()).step_by(8) {
        svg.text(x(decision as f64), BOTTOM + 18.0, Anchor::Middle, "tick", &decision.to_string());
    }
    svg.text((LEFT + RIGHT) / 2.0, BOTTOM + 38.0, Anchor::Middle, "", "decisions, one every five seconds");
    let mut begins = 0;
    for Stretch { name, decisions, .. } in STRETCHES {
        svg.line((x(begins as f64), TOP - 18.0), (x(begins as f64), BOTTOM), "stretch");
        svg.text(x(begins as f64) + 6.0, TOP - 8.0, Anchor::Start, "", name);
        begins += decisions;
    }
    let mut curve = |class, of: fn(&Seconds) -> f64| {
        let steps = events.iter().enumerate();
        let points = steps.flat_map(|(i, event)| [(i, of(event)), (i + 1, of(event))]);
        svg.polyline(points.map(|(i, value)| (x(i as f64), y(value))), class);
    };
    curve("workers", |event| event.workers as f64);
    curve("wanted", |event| event.wanted / OF_WORKER);
    curve("delivered", |event| event.delivered / OF_WORKER);
    svg.text(LEFT, 18.0, Anchor::Start, "wanted", "– –  M samples/s that the trainer would take");
    svg.text(LEFT + 352.0, 18.0, Anchor::Start, "delivered", "—  M samples/s that it gets");
    svg.text(RIGHT, 18.0, Anchor::End, "workers", "—  workers (right)");
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\">\n<title>Autoscaling</title>\n\
         {STYLE}\n{}\n</svg>\n",
        svg.body.replace("/><", "/>\n<").replace("</text><", "</text>\n<")
    )
}
