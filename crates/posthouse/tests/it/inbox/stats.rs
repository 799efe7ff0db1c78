//! What an inbox tells of itself.

use posthouse::inbox::{Handled, HandlerError, Incoming};

use super::{Fixture, order};
use crate::support::{Sqlite, bounded};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_inbox_counts_what_it_did() {
    bounded(async {
        let f = Fixture::<Sqlite>::new().await;
        assert_eq!(f.process(&order("done")).await, Handled::Processed);
        for _ in 0..2 {
            assert_eq!(f.process(&order("done")).await, Handled::Duplicate);
        }
        let _ = f.fail(&order("later"), || HandlerError::retry("no stock")).await;
        let _ = f.fail(&order("never"), || HandlerError::reject("no such thing")).await;
        assert_eq!(f.process(&Incoming::new("", "{}")).await, Handled::Failed, "set aside");
        // A clone, which a worker has too, counts in the same place.
        f.all_due().await;
        assert_eq!(
            f.inbox.clone().process(&order("later"), async |_: &mut _| Ok::<_, HandlerError>(())).await.unwrap(),
            Handled::Processed
        );
        let stats = f.inbox.stats();
        assert_eq!((stats.processed, stats.duplicates, stats.retried, stats.failed, stats.errors), (2, 2, 1, 2, 0), "{stats:?}");
        assert_eq!(stats.handler_time.count(), 4, "duplicates call no handler");

        f.inbox.outbox().pool().close().await;
        f.inbox.process(&order("lost"), async |_: &mut _| Ok::<_, HandlerError>(())).await.unwrap_err();
        assert_eq!(f.inbox.stats().errors, 1);
    })
    .await;
}
