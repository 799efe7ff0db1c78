import com.gruelbox.transactionoutbox.Dialect;
import com.gruelbox.transactionoutbox.Instantiator;
import com.gruelbox.transactionoutbox.Persistor;
import com.gruelbox.transactionoutbox.Submitter;
import com.gruelbox.transactionoutbox.TransactionManager;
import com.gruelbox.transactionoutbox.TransactionOutbox;
import com.zaxxer.hikari.HikariConfig;
import com.zaxxer.hikari.HikariDataSource;
import java.sql.Connection;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.Statement;
import java.time.Duration;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;

/** transaction-outbox of gruelbox. */
final class Gruelbox implements Driver.Peer {
    /** What is scheduled: a call of this interface is what the library stores. */
    public interface Sender {
        void send(String body);
    }

    /** Each sends one message at a time and waits for its confirm, so their number is what is in flight. */
    private static final int THREADS = 32;

    /**
     * An entry whose own process didn't deal with it is taken up by flush() after this time; the default is two minutes. A
     * backlog that was written while nothing was sent waits for it: not part of what is measured, see {@link #run}.
     */
    private static final Duration ATTEMPT_FREQUENCY = Duration.ofSeconds(10);

    private final HikariDataSource pool;
    private final TransactionManager transactions;
    private final TransactionOutbox outbox;
    private final ExecutorService executor = Executors.newFixedThreadPool(THREADS);
    private volatile boolean running = false;
    private volatile long lastPublish = System.nanoTime() - ATTEMPT_FREQUENCY.toNanos();
    private Thread flusher;

    private Gruelbox(Driver.Config config, Driver.Broker broker) {
        HikariConfig options = new HikariConfig();
        options.setJdbcUrl(config.jdbc());
        options.setUsername(config.user());
        options.setMaximumPoolSize(config.connections() + THREADS + 1);
        pool = new HikariDataSource(options);
        transactions = TransactionManager.fromDataSource(pool);
        Submitter submitter = Submitter.withExecutor(executor);
        outbox = TransactionOutbox.builder()
                .transactionManager(transactions)
                .persistor(Persistor.forDialect(Dialect.POSTGRESQL_9))
                .instantiator(Instantiator.using(type -> (Sender) broker::send))
                // Sent by the process that published, right after its commit: the library's way, and its fastest.
                .submitter((entry, process) -> {
                    if (running) {
                        submitter.submit(entry, process);
                    }
                })
                .attemptFrequency(ATTEMPT_FREQUENCY)
                .initializeImmediately(false)
                .build();
    }

    public static void main(String[] arguments) throws Exception {
        Driver.Config config = Driver.Config.of(arguments);
        Driver.Broker broker = new Driver.Broker(config);
        Driver.serve(config, broker, new Gruelbox(config, broker));
    }

    @Override
    public String prepare() throws Exception {
        try (Connection connection = pool.getConnection(); Statement statement = connection.createStatement()) {
            statement.execute(Driver.ORDERS);
        }
        outbox.initialize();
        return Driver.versionOf("transactionoutbox-core");
    }

    @Override
    public void transaction(long order, String body) throws Exception {
        transactions.inTransactionThrows(tx -> {
            try (PreparedStatement statement = tx.connection().prepareStatement(Driver.ORDER)) {
                statement.setLong(1, order);
                statement.setString(2, "customer");
                statement.executeUpdate();
            }
            if (body != null) {
                outbox.schedule(Sender.class).send(body);
            }
        });
        lastPublish = System.nanoTime();
    }

    /** Returns when everything that was published is due. */
    @Override
    public void run() throws Exception {
        long due = lastPublish + ATTEMPT_FREQUENCY.toNanos() + 100_000_000;
        Thread.sleep(Math.max(0, (due - System.nanoTime()) / 1_000_000));
        running = true;
        // The loop of its documentation. There it pauses for a minute, here for a second.
        flusher = new Thread(() -> {
            while (!Thread.interrupted()) {
                try {
                    while (outbox.flush()) {
                        // The next batch.
                    }
                    Thread.sleep(1_000);
                } catch (InterruptedException e) {
                    break;
                }
            }
        });
        flusher.start();
    }

    @Override
    public void stop() throws Exception {
        running = false;
        flusher.interrupt();
        flusher.join();
    }

    @Override
    public long pending() throws Exception {
        try (Connection connection = pool.getConnection();
                Statement statement = connection.createStatement();
                ResultSet rows = statement.executeQuery("SELECT count(*) FROM txno_outbox WHERE NOT processed")) {
            rows.next();
            return rows.getLong(1);
        }
    }

    @Override
    public void close() throws Exception {
        executor.shutdown();
        executor.awaitTermination(10, TimeUnit.SECONDS);
        pool.close();
    }
}
