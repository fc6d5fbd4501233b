//! A plan as an HTML page: the time and memory of every rank, and the placement of the large tables.

use std::fmt::Write;

use onefold_base::units::{format_bytes, format_count};
use onefold_page::svg::{Bar, bars};
use onefold_page::text::escape;
use onefold_page::{STYLE, document, legend, section};
use onefold_sharding::{Plan, RankGroup, RankPrediction, ShardingType, TablePlan, Topology};

/// The number of tables that are listed; the others are only counted.
const LISTED: usize = 200;
const LABEL_WIDTH: f64 = 72.0;
/// The style of columns with text.
const OWN_STYLE: &str = "td.text, th.text { text-align: left; white-space: normal; }\n";

/// Returns a self-contained page with the plan's ranks and tables.
pub(crate) fn html(plan: &Plan) -> String {
    let times = legend(&[
        ("c0", "computation"),
        ("arrival", "communication"),
        ("c1", "computation of the bottleneck"),
    ]);
    let memory =
        legend(&[("c2", "tables and optimizer state"), ("c4", "exchange buffers with their reserve")]);
    let body = [
        format!("<h1>Where embedding tables are</h1>\n{}", summary(plan)),
        section("Predicted time per step, by rank", &cost(plan), &format!("{times}\n{}", cost_chart(plan))),
        section("Memory, by rank", &fullest(plan), &format!("{memory}\n{}", memory_chart(plan))),
        section("Tables", &counted(plan), &table_list(plan)),
    ];
    document("Plan", &format!("{STYLE}{OWN_STYLE}"), &body)
}

fn summary(plan: &Plan) -> String {
    let topology = &plan.topology;
    let machines = match topology.nodes() {
        1 => "one machine".to_owned(),
        several => format!("{} machines", format_count(u64::from(several))),
    };
    let mut text = format!(
        "<p class=\"facts\">{} ranks on {machines}: {}. Found by {}, with costs by {}.</p>\n",
        format_count(u64::from(topology.ranks)),
        hardware(topology),
        escape(&plan.search),
        escape(&plan.cost_model)
    );
    for note in &plan.notes {
        let _ = writeln!(text, "<p class=\"estimate\">{}</p>", escape(note));
    }
    text
}

/// Returns the memory and hardware of the ranks: `80.0 GiB each for tables and buffers`, or such a text for each
/// group.
fn hardware(topology: &Topology) -> String {
    let of = |rank: u32| {
        let memory = format_bytes(topology.memory_of(rank));
        let name = topology.hardware_of(rank).map(|name| format!(", {}", escape(name)));
        format!("{memory} each for tables and buffers{}", name.unwrap_or_default())
    };
    if topology.groups.is_empty() {
        return of(0);
    }
    let mut first = 0;
    let group = |group: &RankGroup| {
        let text = format!("{} with {}", format_count(u64::from(group.ranks)), of(first));
        first += group.ranks;
        text
    };
    topology.groups.iter().map(group).collect::<Vec<_>>().join("; ")
}

fn cost(plan: &Plan) -> String {
    let costs: f64 = plan.ranks.iter().map(RankPrediction::cost_ms).sum();
    let mean = costs / plan.ranks.len().max(1) as f64;
    let balance = if plan.max_cost_ms > 0.0 { 100.0 * mean / plan.max_cost_ms } else { 100.0 };
    format!(
        "<b>{:.4} ms</b> per step of {} samples, set by rank {}; the mean rank takes {mean:.4} ms ({balance:.0} %).",
        plan.max_cost_ms,
        format_count(plan.global_batch_size),
        plan.bottleneck().map_or(0, |rank| rank.rank)
    )
}

fn cost_chart(plan: &Plan) -> String {
    let worst = plan.bottleneck().map(|rank| rank.rank);
    let bar = |rank: &RankPrediction| {
        let compute = if Some(rank.rank) == worst { "c1" } else { "c0" };
        Bar {
            label: format!("rank {}", rank.rank),
            parts: vec![(compute, rank.compute_ms), ("arrival", rank.communication_ms)],
            text: format!("{:.4} + {:.4} ms", rank.compute_ms, rank.communication_ms),
            limit: None,
        }
    };
    bars("Predicted time of every rank", &plan.ranks.iter().map(bar).collect::<Vec<_>>(), LABEL_WIDTH)
}

fn fullest(plan: &Plan) -> String {
    plan.fullest().map_or(String::new(), |rank| {
        let (held, limit) = (rank.total_bytes(), plan.topology.memory_of(rank.rank));
        let part = 100.0 * held as f64 / limit.max(1) as f64;
        format!("The fullest rank holds {part:.1} % of its limit of {}.", format_bytes(limit))
    })
}

fn memory_chart(plan: &Plan) -> String {
    let limit_of = |rank: &RankPrediction| plan.topology.memory_of(rank.rank) as f64;
    let fullest = plan.ranks.iter().map(|rank| rank.total_bytes() as f64).fold(0.0, f64::max);
    // Limits are drawn only if the bars remain readable on the resulting scale.
    let drawn = fullest * 4.0 >= plan.ranks.iter().map(limit_of).fold(0.0, f64::max);
    let bar = |rank: &RankPrediction| {
        let buffers = rank.buffer_bytes.saturating_add(rank.reserve_bytes);
        Bar {
            label: format!("rank {}", rank.rank),
            parts: vec![("c2", rank.memory_bytes as f64), ("c4", buffers as f64)],
            text: format!("{} + {}", format_bytes(rank.memory_bytes), format_bytes(buffers)),
            limit: drawn.then(|| limit_of(rank)),
        }
    };
    bars("Memory of every rank", &plan.ranks.iter().map(bar).collect::<Vec<_>>(), LABEL_WIDTH)
}

fn counted(plan: &Plan) -> String {
    let kinds = [
        ShardingType::TableWise,
        ShardingType::ColumnWise,
        ShardingType::RowWise,
        ShardingType::DataParallel,
    ];
    let count = |kind: ShardingType| plan.tables.iter().filter(|table| table.sharding_type == kind).count();
    let counted = kinds.into_iter().map(|kind| (kind, count(kind))).filter(|(_, count)| *count > 0);
    let counted: Vec<String> =
        counted.map(|(kind, count)| format!("{} {}", format_count(count as u64), kind.name())).collect();
    let shards: usize = plan.tables.iter().map(|table| table.shards.len()).sum();
    format!(
        "{}, in {} shards: {}.",
        format_count(plan.tables.len() as u64),
        format_count(shards as u64),
        counted.join(", ")
    )
}

fn table_list(plan: &Plan) -> String {
    let mut tables: Vec<&TablePlan> = plan.tables.iter().collect();
    let elements = |table: &TablePlan| u128::from(table.rows) * u128::from(table.dim);
    tables.sort_by_key(|table| std::cmp::Reverse(elements(table)));
    let head = ["sharding", "ranks", "why"].map(|name| format!("<th class=\"text\">{name}</th>")).concat();
    let mut list = format!("<table>\n<tr><th>table</th><th>rows</th><th>dimension</th>{head}</tr>\n");
    for table in tables.iter().take(LISTED) {
        let _ = writeln!(
            list,
            "<tr><td>{}</td><td>{}</td><td>{}</td><td class=\"text\">{}</td><td class=\"text\">{}</td><td class=\"text\">{}</td></tr>",
            escape(&table.name),
            format_count(table.rows),
            table.dim,
            table.sharding_type.name(),
            table.described_ranks(),
            escape(table.reason.as_deref().unwrap_or(""))
        );
    }
    list.push_str("</table>");
    if tables.len() > LISTED {
        let more = format_count((tables.len() - LISTED) as u64);
        let _ = write!(list, "\n<p>{more} smaller tables are not listed.</p>");
    }
    list
}

#[cfg(test)]
mod tests {
    use onefold_sharding::{AnalyticCost, Beam, Search, Table};

    use super::*;

    #[test]
    fn the_page_shows_every_rank_and_table_and_escapes_names() {
        let tables: Vec<Table> = (0..6).map(|i| Table::new(format!("t<{i}>"), 1000 * (i + 1), 64)).collect();
        let topology = Topology::h100(4, 4 << 20).unwrap();
        let batch = topology.global_batch_size(64);
        let plan = Beam::Full.plan(&tables, &topology, &AnalyticCost, batch).unwrap();
        let page = html(&plan);
        for i in 0..6 {
            assert!(page.contains(&format!("<td>t&lt;{i}&gt;</td>")), "{page}");
        }
        assert!(!page.contains("t<0>"));
        for rank in 0..4 {
            // The label occurs once in each chart.
            assert_eq!(page.matches(&format!("class=\"label\">rank {rank}</text>")).count(), 2);
        }
        assert!(page.contains("class=\"c1\"") && !page.contains("http"));
        assert!(plan.tables.iter().all(|table| table.reason.is_some()));
    }
}
