//! Exports a timeline in Chrome's trace format, which Perfetto opens.
//!
//! The format is Google's "Trace Event Format": complete events (`"ph": "X"`) with microseconds in `ts` and
//! `dur`, and metadata events (`"ph": "M"`) that name processes.

use serde_json::{Value, json};

use super::Timeline;

impl Timeline {
    /// Returns the timeline as JSON in Chrome's trace format. It has a process per rank, with an event per
    /// step, which contains an event per span; the category of a span is its kind. Times are microseconds since
    /// the beginning of the first step.
    pub fn chrome(&self) -> String {
        let begin = self.steps.iter().map(|step| step.began_micros).min().unwrap_or(0);
        let mut events: Vec<Value> = Vec::new();
        for rank in 0..self.ranks {
            let named = |name: &str, args: Value| json!({ "ph": "M", "name": name, "pid": rank, "tid": 0, "args": args });
            events.push(named("process_name", json!({ "name": format!("rank {rank}") })));
            events.push(named("process_sort_index", json!({ "sort_index": rank })));
        }
        for step in &self.steps {
            let event = |name: &str, category: &str, start: u64, length: u64| {
                let ts = step.began_micros - begin + start;
                json!({
                    "ph": "X", "name": name, "cat": category, "ts": ts, "dur": length,
                    "pid": step.rank, "tid": 0,
                })
            };
            let mut whole = event(&format!("step {}", step.step), "step", 0, step.length_micros);
            whole["args"] = json!({ "step": step.step, "sent_bytes": step.sent_bytes });
            events.push(whole);
            events.extend(step.spans.iter().map(|span| {
                let length = span.end_micros - span.start_micros;
                event(span.name.label(), span.name.kind().name(), span.start_micros, length)
            }));
        }
        json!({ "displayTimeUnit": "ms", "traceEvents": events }).to_string() + "\n"
    }
}
