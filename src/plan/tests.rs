//! Decision-table cases.
