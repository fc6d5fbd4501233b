//! SQL queries of DataFusion.
//!
//! The compiler generates the code of an async function in every crate that calls it. For [`SessionContext::sql`] this
//! includes DataFusion's SQL planner, which took a quarter of the compile time of `onefold-ingest`, and the same again
//! for its tests. This crate compiles it once. `clippy.toml` forbids the other crates to call it.

#![forbid(unsafe_code)]

use async_trait::async_trait;
use datafusion::error::Result;
use datafusion::prelude::{DataFrame, SQLOptions, SessionContext};

/// Plans queries in SQL.
#[async_trait]
pub trait Query {
    /// Plans a query, like [`SessionContext::sql`].
    ///
    /// # Errors
    ///
    /// The errors of [`SessionContext::sql`].
    async fn query(&self, sql: &str) -> Result<DataFrame>;

    /// Plans a query, like [`SessionContext::sql_with_options`].
    ///
    /// # Errors
    ///
    /// The errors of [`SessionContext::sql_with_options`].
    async fn query_with_options(&self, sql: &str, options: SQLOptions) -> Result<DataFrame>;
}

#[async_trait]
impl Query for SessionContext {
    async fn query(&self, sql: &str) -> Result<DataFrame> {
        self.query_with_options(sql, SQLOptions::new()).await
    }

    #[allow(clippy::disallowed_methods)]
    async fn query_with_options(&self, sql: &str, options: SQLOptions) -> Result<DataFrame> {
        self.sql_with_options(sql, options).await
    }
}
