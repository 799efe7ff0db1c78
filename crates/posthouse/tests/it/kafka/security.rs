//! Who we are and what we may do, asked of a broker that cares.
