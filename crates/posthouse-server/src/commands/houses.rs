//! `posthouse houses`.

use comfy_table::{Cell, CellAlignment, Color};
use posthouse::store::HouseRow;
use serde_json::json;

use super::{confirm, load, one_database};
use crate::cli::{Global, Houses};
use crate::failure::Failure;
use crate::output::{self, clean};

pub(crate) async fn run(global: &Global, command: Houses) -> Result<(), Failure> {
    let config = load(global)?;
    let database = one_database(&config)?;
    match command {
        Houses::List => {
            let (store, ..) = database.ready().await?;
            let houses = store.houses().await.map_err(|e| database.failure(&e))?;
            if global.json {
                output::json(&json!({ "database": database.name, "houses": houses }));
            } else {
                list(&houses);
            }
        }
        Houses::Resize { houses, yes } => {
            database.reach().await?;
            let store = database.store();
            let (_, now) = store.check().await.map_err(|e| database.failure(&e))?;
            // Messages in houses that don't exist get theirs when the number is set anew.
            let strays = [(i32::MIN, -1), (i32::from(now), i32::MAX)];
            let strays = store.rows_in(&strays).await.map_err(|e| database.failure(&e))?;
            if now == houses && strays.is_empty() {
                if global.json {
                    output::json(&json!({ "database": database.name, "houses": houses, "before": now, "moved": 0 }));
                } else {
                    output::say(&format!("{}: already has {}", clean(&database.name), output::count(houses.into(), "house")));
                }
                return Ok(());
            }
            confirm(
                &format!(
                    "Change database {:?} from {now} to {houses} houses? Publishers and relays wait while every pending message gets its new house.",
                    database.name
                ),
                yes,
            )?;
            let spinner = indicatif::ProgressBar::new_spinner().with_message("re-housing pending messages; publishers wait");
            spinner.enable_steady_tick(std::time::Duration::from_millis(100));
            let moved = store.resize(houses).await;
            spinner.finish_and_clear();
            let moved = moved.map_err(|e| database.failure(&e))?;
            if global.json {
                output::json(&json!({ "database": database.name, "houses": houses, "before": now, "moved": moved }));
            } else {
                output::say(&format!(
                    "{}: {}, {} re-housed",
                    clean(&database.name),
                    output::count(houses.into(), "house"),
                    output::count(moved as usize, "pending message")
                ));
            }
        }
    }
    Ok(())
}

/// One line per run of consecutive houses with the same owner.
fn list(houses: &[HouseRow]) {
    let mut table = output::table(&["houses", "owner", "lease", "pending"]);
    let coloured = output::coloured();
    for run in houses.chunk_by(|a, b| a.owner == b.owner && a.alive == b.alive) {
        let (Some(first), Some(last)) = (run.first(), run.last()) else { continue };
        let range = if first.house == last.house { first.house.to_string() } else { format!("{}-{}", first.house, last.house) };
        let lease = match (&first.owner, first.alive) {
            (None, _) => Cell::new(""),
            (Some(_), true) => Cell::new("valid"),
            (Some(_), false) if coloured => Cell::new("expired").fg(Color::Red),
            (Some(_), false) => Cell::new("expired"),
        };
        let pending: i64 = run.iter().map(|h| h.pending).sum();
        table.add_row(vec![
            Cell::new(range),
            Cell::new(first.owner.as_deref().map_or_else(|| "(nobody)".into(), clean)),
            lease,
            Cell::new(pending).set_alignment(CellAlignment::Right),
        ]);
    }
    output::print_table(table);
    let pending: i64 = houses.iter().map(|h| h.pending).sum();
    let mut owners: Vec<&str> = houses.iter().filter(|h| h.alive).filter_map(|h| h.owner.as_deref()).collect();
    owners.sort_unstable();
    owners.dedup();
    output::say(&format!(
        "\n{}, {} pending, {}",
        output::count(houses.len(), "house"),
        pending,
        output::count(owners.len(), "live owner")
    ));
}
