import io.namastack.outbox.Outbox;
import io.namastack.outbox.handler.OutboxRecordMetadata;
import io.namastack.outbox.handler.OutboxTypedHandler;
import java.util.HashMap;
import java.util.Map;
import org.springframework.boot.SpringBootConfiguration;
import org.springframework.boot.WebApplicationType;
import org.springframework.boot.autoconfigure.EnableAutoConfiguration;
import org.springframework.boot.builder.SpringApplicationBuilder;
import org.springframework.context.ConfigurableApplicationContext;
import org.springframework.context.annotation.Bean;
import org.springframework.jdbc.core.JdbcTemplate;
import org.springframework.transaction.PlatformTransactionManager;
import org.springframework.transaction.support.TransactionTemplate;

/** namastack-outbox, in a Spring Boot application without a web server. */
final class Namastack implements Driver.Peer {
    /** Each sends one message at a time and waits for its confirm, so their number is what is in flight. */
    private static final int THREADS = 32;

    /** The message, as the library stores it. */
    public record Send(String body) {}

    /** The application. */
    @SpringBootConfiguration
    @EnableAutoConfiguration
    static class Application {
        static Driver.Broker broker;

        @Bean
        OutboxTypedHandler<Send> sender() {
            return new OutboxTypedHandler<>() {
                @Override
                public void handle(Send payload, OutboxRecordMetadata metadata) {
                    broker.send(payload.body());
                }
            };
        }
    }

    private final Driver.Config config;
    private ConfigurableApplicationContext application;
    private Outbox outbox;
    private JdbcTemplate jdbc;
    private TransactionTemplate transactions;

    private Namastack(Driver.Config config) {
        this.config = config;
    }

    public static void main(String[] arguments) throws Exception {
        Driver.Config config = Driver.Config.of(arguments);
        Application.broker = new Driver.Broker(config);
        Driver.serve(config, Application.broker, new Namastack(config));
    }

    /** The library has no switch for an application that only publishes, so that one polls every hour. */
    private void open(boolean sending) {
        Map<String, Object> settings = new HashMap<>();
        settings.put("spring.datasource.url", config.jdbc());
        settings.put("spring.datasource.username", config.user());
        settings.put("spring.datasource.hikari.maximum-pool-size", config.connections() + THREADS + 4);
        settings.put("spring.main.banner-mode", "off");
        settings.put("logging.level.root", "warn");
        // A poll takes so many keys (a message without a key has one of its own); the default is 10.
        settings.put("namastack.outbox.polling.batch-size", 1_000);
        // Nothing tells it of a new message: it polls, by default every 2 s.
        settings.put("namastack.outbox.polling.trigger", "fixed");
        settings.put("namastack.outbox.polling.fixed.interval", sending ? "50ms" : "1h");
        settings.put("namastack.outbox.processing.executor-core-pool-size", THREADS);
        settings.put("namastack.outbox.processing.executor-max-pool-size", THREADS);
        // Else the table grows, and what is measured with it.
        settings.put("namastack.outbox.processing.delete-completed-records", true);
        // Not of its speed: how soon the sending application takes over from the publishing one.
        settings.put("namastack.outbox.instance.rebalance-interval", "1s");
        application = new SpringApplicationBuilder(Application.class).web(WebApplicationType.NONE).properties(settings).run();
        outbox = application.getBean(Outbox.class);
        jdbc = application.getBean(JdbcTemplate.class);
        transactions = new TransactionTemplate(application.getBean(PlatformTransactionManager.class));
    }

    private void reopen(boolean sending) {
        application.close();
        open(sending);
    }

    @Override
    public String prepare() {
        open(false);
        jdbc.execute(Driver.ORDERS);
        return Driver.versionOf("namastack-outbox-core");
    }

    @Override
    public void transaction(long order, String body) {
        transactions.executeWithoutResult(status -> {
            jdbc.update(Driver.ORDER, order, "customer");
            if (body != null) {
                outbox.schedule(new Send(body));
            }
        });
    }

    @Override
    public void run() {
        reopen(true);
    }

    @Override
    public void stop() {
        reopen(false);
    }

    @Override
    public long pending() {
        return jdbc.queryForObject("SELECT count(*) FROM outbox_record WHERE status <> 'COMPLETED'", Long.class);
    }

    @Override
    public void close() {
        application.close();
    }
}
