//! Whole-system tests of the pair.
