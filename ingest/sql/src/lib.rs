//! SQL queries of DataFusion.
//!
//! The compiler generates the code of an asynchronous function in every crate that calls it. For
//! [`SessionContext::sql`] that includes DataFusion's SQL planner: a quarter of the time that `onefold-ingest` took to
//! compile, and again for its tests. This crate compiles it once. `clippy.toml` keeps the others from calling it.

#![forbid(unsafe_code)]

use async_trait::async_trait;
use datafusion::error::Result;
use datafusion::prelude::{DataFrame, SQLOptions, SessionContext};

/// Plans queries in SQL.
#[async_trait]
pub trait Query {
    /// As [`SessionContext::sql`].
    ///
    /// # Errors
    ///
    /// Those of [`SessionContext::sql`].
    async fn query(&self, sql: &str) -> Result<DataFrame>;

    /// As [`SessionContext::sql_with_options`].
    ///
    /// # Errors
    ///
    /// Those of [`SessionContext::sql_with_options`].
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
