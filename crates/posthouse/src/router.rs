//! Which of several databases and tables a key belongs to.

use crc::{CRC_32_ISO_HDLC, Crc};

use crate::Error;

/// What zlib, gzip and `CRC32()` of MySQL compute, so that every client can find a key's place.
const CRC: Crc<u32> = Crc::<u32>::new(&CRC_32_ISO_HDLC);

/// The most places a router may have: databases times tables.
pub const MAX_PLACES: usize = 65_536;

/// A database and a table in it, both counted from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Place {
    /// The database: 0 for the first.
    pub database: usize,
    /// The table within it: 0 for the first.
    pub table: usize,
}

/// Shares keys out over a number of databases with the same number of tables each. All rows of a key have one place, so what
/// happens to the key stays in one transaction.
///
/// ```
/// # fn main() -> Result<(), posthouse::Error> {
/// use posthouse::Router;
///
/// let router = Router::new(2, 4)?;
/// let place = router.route("user-1");
/// // let outbox = &outboxes[place.database][place.table];
/// # assert_eq!((place.database, place.table), (1, 0));
///
/// // A test, or a row that has to be where another one is:
/// let place = router.forced(1, 3)?;
/// # assert_eq!(place.table, 3);
/// # Ok(()) }
/// ```
///
/// The place of a key never changes while the numbers stay as they are; with other numbers most keys get another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Router {
    databases: usize,
    tables: usize,
    compat: bool,
}

impl Router {
    /// A router over `databases` databases with `tables` tables each. The place of a key is its CRC-32 (of the bytes of its UTF-8,
    /// as an unsigned number) modulo `databases * tables`: divided by `tables` it gives the database, the remainder is the table.
    /// In MySQL: `CRC32(user_id) % 8`.
    ///
    /// # Errors
    /// [`Error::Config`]: a number is 0, or there are more than [`MAX_PLACES`] places.
    pub fn new(databases: usize, tables: usize) -> Result<Self, Error> {
        Self::checked(databases, tables, false)
    }

    /// A router that gives every key the place that the database routers for Java do which take the low bits of a spread
    /// `hashCode`: `(size - 1) & (h ^ (h >>> 16))` with `size` = databases * tables. They count databases from 1, and tables from
    /// 0: their "database 2, table 3" is `Place { database: 1, table: 3 }` here.
    ///
    /// # Errors
    /// [`Error::Config`]: as [`new`](Self::new), and where databases * tables isn't a power of two: the formula never reaches some
    /// of the places then (of 3 * 4 it reaches 8).
    pub fn compat(databases: usize, tables: usize) -> Result<Self, Error> {
        let router = Self::checked(databases, tables, true)?;
        let size = databases * tables;
        if !size.is_power_of_two() {
            let reached = (0..size).filter(|bits| (size - 1) & bits == *bits).count();
            return Err(Error::Config(format!(
                "router: {databases} databases * {tables} tables = {size} is not a power of two; the compatible formula would reach \
                 only {reached} of these places. Choose other numbers, or Router::new, which reaches all"
            )));
        }
        Ok(router)
    }

    fn checked(databases: usize, tables: usize, compat: bool) -> Result<Self, Error> {
        for (what, n) in [("databases", databases), ("tables", tables)] {
            if n == 0 {
                return Err(Error::Config(format!("router: {what} must be at least 1")));
            }
        }
        if databases.checked_mul(tables).is_none_or(|n| n > MAX_PLACES) {
            return Err(Error::Config(format!(
                "router: {databases} databases * {tables} tables are more than {MAX_PLACES} places, which is the most there may be"
            )));
        }
        Ok(Self { databases, tables, compat })
    }

    /// The place of a key.
    pub fn route(&self, key: &str) -> Place {
        let size = self.databases * self.tables;
        let index = if self.compat {
            let h = java_hash(key);
            (size - 1) & (h ^ (h >> 16)) as usize
        } else {
            CRC.checksum(key.as_bytes()) as usize % size
        };
        Place { database: index / self.tables, table: index % self.tables }
    }

    /// A place of the caller's own choice, both numbers counted from 0.
    ///
    /// # Errors
    /// [`Error::Config`]: there is no such place.
    pub fn forced(&self, database: usize, table: usize) -> Result<Place, Error> {
        for (what, n, count) in [("database", database, self.databases), ("table", table, self.tables)] {
            if n >= count {
                return Err(Error::Config(format!("router: there is no {what} {n}; they are 0 to {}", count - 1)));
            }
        }
        Ok(Place { database, table })
    }

    /// All places, by database and table.
    pub fn places(&self) -> impl Iterator<Item = Place> + use<> {
        let tables = self.tables;
        (0..self.databases).flat_map(move |database| (0..tables).map(move |table| Place { database, table }))
    }
}

/// `String.hashCode()` of Java: 31-adic over UTF-16 units, with overflow; as the unsigned number that `>>>` sees.
fn java_hash(text: &str) -> u32 {
    text.encode_utf16().fold(0u32, |hash, unit| hash.wrapping_mul(31).wrapping_add(u32::from(unit)))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// Key, databases, tables, and the place: made with Python's `zlib.crc32`.
    const VECTORS: [(&str, usize, usize, usize, usize); 21] = [
        ("980765512", 2, 4, 1, 0),
        ("980765512", 3, 4, 2, 0),
        ("980765512", 5, 7, 0, 6),
        ("", 2, 4, 0, 0),
        ("", 3, 4, 0, 0),
        ("", 5, 7, 0, 0),
        ("a", 2, 4, 0, 3),
        ("a", 3, 4, 0, 3),
        ("a", 5, 7, 4, 4),
        ("user-1", 2, 4, 1, 0),
        ("user-1", 3, 4, 2, 0),
        ("user-1", 5, 7, 2, 5),
        ("order-4711", 2, 4, 1, 3),
        ("order-4711", 3, 4, 1, 3),
        ("order-4711", 5, 7, 4, 0),
        ("订单-7", 2, 4, 0, 1),
        ("订单-7", 3, 4, 1, 1),
        ("订单-7", 5, 7, 1, 5),
        ("😀", 2, 4, 1, 0),
        ("😀", 3, 4, 1, 0),
        ("😀", 5, 7, 0, 6),
    ];

    /// Key, databases, tables, and the place as the routers for Java count: database from 1, table from 0. Made with a JVM's
    /// `hashCode` and the formula in Java.
    const COMPAT: [(&str, usize, usize, usize, usize); 48] = [
        ("980765512", 2, 4, 2, 3),
        ("980765512", 1, 1, 1, 0),
        ("980765512", 4, 8, 1, 7),
        ("980765512", 8, 16, 5, 7),
        ("", 2, 4, 1, 0),
        ("", 1, 1, 1, 0),
        ("", 4, 8, 1, 0),
        ("", 8, 16, 1, 0),
        ("a", 2, 4, 1, 1),
        ("a", 1, 1, 1, 0),
        ("a", 4, 8, 1, 1),
        ("a", 8, 16, 7, 1),
        ("user-1", 2, 4, 2, 0),
        ("user-1", 1, 1, 1, 0),
        ("user-1", 4, 8, 1, 4),
        ("user-1", 8, 16, 1, 4),
        ("order-4711", 2, 4, 2, 1),
        ("order-4711", 1, 1, 1, 0),
        ("order-4711", 4, 8, 3, 5),
        ("order-4711", 8, 16, 4, 5),
        ("xiaofuge", 2, 4, 1, 1),
        ("xiaofuge", 1, 1, 1, 0),
        ("xiaofuge", 4, 8, 1, 1),
        ("xiaofuge", 8, 16, 1, 1),
        ("polygenelubricants", 2, 4, 1, 0),
        ("polygenelubricants", 1, 1, 1, 0),
        ("polygenelubricants", 4, 8, 1, 0),
        ("polygenelubricants", 8, 16, 1, 0),
        ("订单-7", 2, 4, 2, 3),
        ("订单-7", 1, 1, 1, 0),
        ("订单-7", 4, 8, 2, 7),
        ("订单-7", 8, 16, 7, 15),
        ("😀", 2, 4, 1, 0),
        ("😀", 1, 1, 1, 0),
        ("😀", 4, 8, 4, 0),
        ("😀", 8, 16, 8, 8),
        ("Aa", 2, 4, 1, 0),
        ("Aa", 1, 1, 1, 0),
        ("Aa", 4, 8, 1, 0),
        ("Aa", 8, 16, 5, 0),
        ("BB", 2, 4, 1, 0),
        ("BB", 1, 1, 1, 0),
        ("BB", 4, 8, 1, 0),
        ("BB", 8, 16, 5, 0),
        ("12345678901", 2, 4, 1, 0),
        ("12345678901", 1, 1, 1, 0),
        ("12345678901", 4, 8, 4, 0),
        ("12345678901", 8, 16, 2, 8),
    ];

    #[test]
    fn keys_have_the_places_of_the_table() {
        for (key, databases, tables, database, table) in VECTORS {
            let router = Router::new(databases, tables).unwrap();
            assert_eq!(router.route(key), Place { database, table }, "{key:?} {databases}x{tables}");
        }
    }

    #[test]
    fn keys_have_the_places_that_java_gives_them() {
        for (key, databases, tables, database, table) in COMPAT {
            let router = Router::compat(databases, tables).unwrap();
            assert_eq!(router.route(key), Place { database: database - 1, table }, "{key:?} {databases}x{tables}");
        }
    }

    #[test]
    fn every_place_gets_its_share() {
        for router in [Router::new(3, 4).unwrap(), Router::new(2, 4).unwrap(), Router::compat(2, 4).unwrap()] {
            let mut counts = BTreeMap::new();
            for i in 0..12_000 {
                *counts.entry(router.route(&format!("user-{i}"))).or_insert(0) += 1;
            }
            let places: Vec<Place> = router.places().collect();
            assert_eq!(counts.keys().copied().collect::<Vec<_>>(), places);
            let even = 12_000 / places.len();
            assert!(counts.values().all(|n| (even * 3 / 4..even * 5 / 4).contains(n)), "{counts:?}");
        }
    }

    #[test]
    fn numbers_that_cannot_hold_are_refused() {
        let told = |e: Result<Router, Error>| e.unwrap_err().to_string();
        assert!(told(Router::new(0, 4)).contains("databases must be at least 1"));
        assert!(told(Router::new(2, 0)).contains("tables must be at least 1"));
        assert!(told(Router::new(usize::MAX, 2)).contains("65536"));
        assert!(told(Router::new(257, 256)).contains("65536"));
        assert!(told(Router::compat(3, 4)).contains("only 8 of these places"));
        let router = Router::new(2, 4).unwrap();
        assert_eq!(router.forced(1, 3).unwrap(), Place { database: 1, table: 3 });
        assert!(router.forced(2, 0).unwrap_err().to_string().contains("no database 2; they are 0 to 1"));
        assert!(router.forced(0, 4).unwrap_err().to_string().contains("no table 4; they are 0 to 3"));
    }
}
