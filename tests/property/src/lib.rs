//! The configuration of property tests that do not run proptest's default of 256 cases.
//!
//! `PROPTEST_RNG_SEED` is set in `.cargo/config.toml`, so a test draws the same cases in every run. `make test-random`
//! sets another seed and, with `PROPTEST_CASES`, a multiple of the cases.

#![forbid(unsafe_code)]

use proptest::test_runner::Config;

/// The default number of cases of a property test.
const DEFAULT_CASES: u64 = 256;

/// Returns a configuration with `count` cases. `PROPTEST_CASES` scales the number: 25,600, which is 100 times the
/// default, gives 100 times as many cases.
#[must_use]
pub fn cases(count: u32) -> Config {
    let default = Config::default();
    let scaled = u64::from(count) * u64::from(default.cases) / DEFAULT_CASES;
    Config { cases: u32::try_from(scaled).unwrap_or(u32::MAX).max(1), ..default }
}
