//! Chooses the labels of samples, and the items that have a label each.

use super::super::columns::{Column, LABELS, Type, in_comment};
use super::super::lists::{are_parallel, is_among, repeats};
use super::{Choice, Expression, Feature, NUMBERS, Roles, is_of_dataset};
use crate::sql::quote;

/// Words in the names of event types, and the values that count as a success.
const EVENTS: &str = "event action behavior behaviour type kind interaction";
const SUCCESSES: &str = "click cart buy purchase transaction order like convert book save";
const RATINGS: &str = "rating stars score grade";

impl Roles<'_> {
    /// Chooses the labels: columns of 0 and 1, chosen items among shown items, some types of events, or ratings.
    pub(super) fn labels(&mut self) {
        let pairs = std::mem::take(&mut self.plan.rows.columns);
        if let [shown, mark] = pairs.as_slice() {
            return self.pairs(shown, mark);
        }
        if self.chosen() || self.binary() || self.events() || self.ratings() || self.unnamed() {
            return;
        }
        let name = self.unused_name("label");
        self.plan.take_as(&name, "0".to_owned());
        let check = "no column is a label, so all are 0: write the column or an expression in its place";
        self.label(&name, String::new(), Some(check.to_owned()));
    }

    fn label(&mut self, name: &str, evidence: String, check: Option<String>) {
        self.plan.features.push(Feature { check, ..Feature::new(name, "label", evidence) });
    }

    /// Makes a sample of each item of a list of pairs of an item and a label.
    fn pairs(&mut self, shown: &str, mark: &str) {
        let Some(column) = self.free.iter().find(|column| column.name == shown).cloned() else { return };
        let pair = self.unnest(&column);
        let (item, label) = (self.unused_name(&format!("{shown}_id")), self.unused_name("label"));
        let quoted = quote(&pair);
        // The label follows the last mark, because the item may contain the mark too.
        let id = format!("substr({quoted}, 1, character_length({quoted}) - 2)");
        self.plan.made.push(Expression { name: item.clone(), sql: id });
        let positive = format!("CASE WHEN {quoted} LIKE '%{mark}1' THEN 1 ELSE 0 END");
        self.plan.made.push(Expression { name: label.clone(), sql: positive });
        self.plan.rows.evidence =
            format!("a sample for each item of `{}`: {}", in_comment(shown), column.examples());
        self.label(&label, format!("1 where `{}` has `{mark}1` behind the item", in_comment(shown)), None);
        self.item(&item, true, format!("the items of `{}`", in_comment(shown)));
        self.key_with(&item, repeats(&column));
        self.remove(shown);
    }

    /// Makes a row of each item, and returns the name of the item column.
    fn unnest(&mut self, column: &Column) -> String {
        let singular = column.name.strip_suffix('s').filter(|name| !name.is_empty());
        let item = singular.filter(|name| self.unused_name(name) == *name).map(str::to_owned);
        let item = item.unwrap_or_else(|| self.unused_name(&format!("{}_item", column.name)));
        self.plan.unnested.push((column.name.clone(), item.clone()));
        item
    }

    fn item(&mut self, name: &str, hash: bool, evidence: String) {
        self.plan.features.push(Feature { hash, ..Feature::new(name, "sparse", evidence) });
    }

    /// If rows have a key, extends the key of samples by the item.
    fn key_with(&mut self, item: &str, item_repeats: bool) {
        if item_repeats {
            self.plan.key = Choice::default();
        } else if !self.plan.key.columns.is_empty() {
            self.plan.key.columns.push(item.to_owned());
        }
    }

    /// Makes a sample of each item of a list. Another column with the chosen item or items gives the labels.
    fn chosen(&mut self) -> bool {
        let labels = self.free.iter().filter(|column| column.says(LABELS) && !column.is_binary());
        let pair =
            labels.filter(|column| column.is_list || column.kind != Type::Boolean).find_map(|chosen| {
                let mut lists = self.free.iter().filter(|shown| shown.is_list && shown.name != chosen.name);
                let shown = lists.find(|shown| shown.kind == chosen.kind && is_among(chosen, shown))?;
                Some((chosen.clone(), shown.clone()))
            });
        let Some((chosen, shown)) = pair else { return false };
        let item = self.unnest(&shown);
        let name = self.unused_name("label");
        let condition = match chosen.is_list {
            true => format!("array_has({}, {})", quote(&chosen.name), quote(&item)),
            false => {
                self.plan.take(&chosen.name);
                format!("{} = {}", quote(&chosen.name), quote(&item))
            }
        };
        let sql = format!("CASE WHEN {condition} THEN 1 ELSE 0 END");
        self.plan.made.push(Expression { name: name.clone(), sql });
        let (chosen_name, shown_name) = (in_comment(&chosen.name), in_comment(&shown.name));
        self.plan.rows.evidence = format!(
            "a sample for each item of `{shown_name}`; all of `{chosen_name}` are among them in the first rows"
        );
        self.label(&name, format!("1 where the item is in `{chosen_name}`: {}", chosen.examples()), None);
        self.item(
            &item,
            shown.kind != Type::Integer,
            format!("the items of `{shown_name}`: {}", shown.examples()),
        );
        self.key_with(&item, repeats(&shown));
        self.remove(&chosen.name);
        self.remove(&shown.name);
        self.parallel(&shown);
        true
    }

    /// Unnests lists that are parallel to the list whose items make samples.
    fn parallel(&mut self, shown: &Column) {
        for column in self.free.clone().iter().filter(|column| column.is_list && are_parallel(shown, column))
        {
            let item = self.unnest(column);
            let items = column.lists.iter().flatten().flat_map(|(items, _)| items);
            let are_numbers = items.clone().all(|item| item.parse::<f64>().is_ok());
            let have_fractions = are_numbers && items.clone().any(|item| item.contains('.'));
            let are_floats =
                column.kind.is_float() || have_fractions || (are_numbers && column.says(NUMBERS));
            let evidence =
                format!("as long as `{}` in each row: {}", in_comment(&shown.name), column.examples());
            if are_floats {
                let name = self.unused_name(&format!("{item}_value"));
                let sql = format!("coalesce(CAST({} AS DOUBLE), 0)", quote(&item));
                self.plan.made.push(Expression { name: name.clone(), sql });
                self.plan.features.push(Feature::new(name, "dense", evidence));
            } else {
                self.item(&item, column.kind != Type::Integer, evidence);
            }
            self.remove(&column.name);
        }
    }

    fn binary(&mut self) -> bool {
        let is_label = |column: &&Column| column.is_binary() && column.says(LABELS);
        let labels: Vec<Column> = self.free.iter().filter(is_label).cloned().collect();
        for column in &labels {
            let nulls = column.nulls();
            let check = format!(
                "{nulls} of {} rows have no `{}`, and are taken for 0",
                self.log.rows,
                in_comment(&column.name)
            );
            self.bits(column, (nulls > 0).then_some(check));
        }
        !labels.is_empty()
    }

    /// Makes a column of 0 and 1 a label.
    fn bits(&mut self, column: &Column, check: Option<String>) {
        let name = match is_of_dataset(&column.name) {
            true => self.unused_name("label"),
            false => column.name.clone(),
        };
        let default = if column.kind == Type::Boolean { "false" } else { "0" };
        self.plan.take_as(&name, format!("coalesce({}, {default})", quote(&column.name)));
        self.label(&name, column.examples(), check);
        self.remove(&column.name);
    }

    /// Makes the first column of 0 and 1 of a log without names a label.
    fn unnamed(&mut self) -> bool {
        let may_be_label =
            |column: &&Column| column.is_unnamed && column.is_binary() && column.distinct().len() > 1;
        let Some(column) = self.free.iter().find(may_be_label).cloned() else { return false };
        let check = "the log has no header, and this column of 0 and 1 may be another one than the label";
        self.bits(&column, Some(check.to_owned()));
        true
    }

    fn events(&mut self) -> bool {
        let is_success = |value: &&str| SUCCESSES.split(' ').any(|word| value.to_lowercase().contains(word));
        let found = self.free.iter().find_map(|column| {
            if column.is_list
                || column.kind != Type::Text
                || !column.says(EVENTS)
                || column.distinct().len() > 12
            {
                return None;
            }
            let values: Vec<String> =
                column.distinct().into_iter().filter(is_success).map(str::to_owned).collect();
            (!values.is_empty() && values.len() < column.distinct().len()).then(|| (column.clone(), values))
        });
        let Some((column, values)) = found else { return false };
        let listed =
            values.iter().map(|value| format!("'{}'", value.replace('\'', "''"))).collect::<Vec<_>>();
        let sql = format!("CASE WHEN {} IN ({}) THEN 1 ELSE 0 END", quote(&column.name), listed.join(", "));
        let name = self.unused_name("label");
        self.plan.take_as(&name, sql);
        let all: Vec<String> = column.distinct().into_iter().map(in_comment).collect();
        let check =
            "each row is a sample, and its own event the label; `[join]` makes labels of later events";
        self.label(
            &name,
            format!("`{}` is one of {}", in_comment(&column.name), all.join(", ")),
            Some(check.to_owned()),
        );
        self.leave_out(&column.name, "the label is made of it");
        true
    }

    fn ratings(&mut self) -> bool {
        let is_number = |column: &&Column| column.kind.is_integer() || column.kind.is_float();
        let rating =
            self.free.iter().filter(is_number).find(|column| !column.is_list && column.says(RATINGS));
        let Some(column) = rating.cloned() else { return false };
        let most = column
            .numbers()
            .unwrap_or_default()
            .into_iter()
            .filter(|number| number.is_finite())
            .fold(0.0, f64::max);
        let least = (0.8 * most).floor();
        let name = self.unused_name("label");
        self.plan.take_as(&name, format!("CASE WHEN {} >= {least} THEN 1 ELSE 0 END", quote(&column.name)));
        let check = format!("ratings from {least} of {most} are positive");
        self.label(&name, format!("`{}`: {}", in_comment(&column.name), column.examples()), Some(check));
        self.leave_out(&column.name, "the label is made of it");
        true
    }
}
