import com.rabbitmq.client.AMQP;
import com.rabbitmq.client.Channel;
import com.rabbitmq.client.Connection;
import com.rabbitmq.client.ConnectionFactory;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.time.Instant;
import java.time.temporal.ChronoUnit;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.UUID;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;
import java.util.function.IntConsumer;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import java.util.stream.Collectors;

/** A Java peer behind the bench's protocol, which ../../node/main.js describes. */
final class Driver {
    /** The version of a library: what is in its jar's name. */
    static String versionOf(String library) {
        Matcher jar = Pattern.compile(Pattern.quote(library) + "-([^/:]*)\\.jar").matcher(System.getProperty("java.class.path"));
        return jar.find() ? jar.group(1) : "unknown";
    }

    /** What is measured. */
    interface Peer {
        /** Makes the tables; answers the version. */
        String prepare() throws Exception;

        /** A transaction of one business row, with a message unless the body is null. */
        void transaction(long order, String body) throws Exception;

        void run() throws Exception;

        void stop() throws Exception;

        /** What isn't finished by the tables. */
        long pending() throws Exception;

        void close() throws Exception;
    }

    static final String ORDERS = "CREATE TABLE bench_orders (id bigint PRIMARY KEY, customer text NOT NULL)";
    static final String ORDER = "INSERT INTO bench_orders (id, customer) VALUES (?, ?)";

    /** Where and with what; given as arguments of this order. */
    record Config(String jdbc, String user, String amqp, String queue, int payload, int connections) {
        static Config of(String[] arguments) {
            return new Config(arguments[0], arguments[1], arguments[2], arguments[3], Integer.parseInt(arguments[4]),
                    Integer.parseInt(arguments[5]));
        }
    }

    /** A connection whose channels each belong to one thread, as the client library asks for. */
    static final class Broker implements AutoCloseable {
        private static final AMQP.BasicProperties PERSISTENT =
                new AMQP.BasicProperties.Builder().deliveryMode(2).contentType("text/plain").build();
        private final Connection connection;
        private final String queue;
        private final AtomicLong confirmed = new AtomicLong();
        private final ThreadLocal<Channel> channel = ThreadLocal.withInitial(this::open);

        Broker(Config config) throws Exception {
            ConnectionFactory factory = new ConnectionFactory();
            factory.setUri(config.amqp());
            connection = factory.newConnection();
            queue = config.queue();
        }

        private Channel open() {
            try {
                Channel channel = connection.createChannel();
                channel.confirmSelect();
                return channel;
            } catch (Exception e) {
                throw new IllegalStateException(e);
            }
        }

        /** Returns when the broker has confirmed. */
        void send(String body) {
            try {
                AMQP.BasicProperties properties = PERSISTENT.builder().messageId(UUID.randomUUID().toString()).build();
                channel.get().basicPublish("", queue, true, properties, body.getBytes(StandardCharsets.UTF_8));
                channel.get().waitForConfirmsOrDie(10_000);
            } catch (Exception e) {
                throw new IllegalStateException(e);
            }
            confirmed.incrementAndGet();
        }

        @Override
        public void close() throws Exception {
            connection.close();
        }
    }

    private final Config config;
    private final Broker broker;
    private final Peer peer;
    private final AtomicLong orders = new AtomicLong();
    private int numbers = 0;

    private Driver(Config config, Broker broker, Peer peer) {
        this.config = config;
        this.broker = broker;
        this.peer = peer;
    }

    /** Obeys until it is told to quit. */
    static void serve(Config config, Broker broker, Peer peer) throws Exception {
        // The libraries' own output must not get into the protocol.
        PrintStream answers = System.out;
        System.setOut(System.err);
        Driver driver = new Driver(config, broker, peer);
        BufferedReader stdin = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = stdin.readLine(); line != null && !line.equals("quit"); line = stdin.readLine()) {
            String[] words = line.split(" ");
            answers.println("{\"done\":\"" + words[0] + "\"" + driver.obey(words) + "}");
        }
        peer.close();
        broker.close();
        // Whatever threads are left.
        System.exit(0);
    }

    private String obey(String[] words) throws Exception {
        switch (words[0]) {
            case "prepare":
                return ",\"version\":\"" + peer.prepare() + "\"";
            case "business":
                return many(Integer.parseInt(words[1]), Integer.parseInt(words[2]), false);
            case "publish":
                return many(Integer.parseInt(words[1]), Integer.parseInt(words[2]), true);
            case "load":
                return load(Integer.parseInt(words[1]), Double.parseDouble(words[2]), Integer.parseInt(words[3]));
            case "run":
                peer.run();
                return "";
            case "confirmed":
                return ",\"confirmed\":" + broker.confirmed.get();
            case "pending":
                return ",\"pending\":" + peer.pending();
            case "stop":
                peer.stop();
                return "";
            default:
                throw new IllegalArgumentException(words[0]);
        }
    }

    private static long micros() {
        return ChronoUnit.MICROS.between(Instant.EPOCH, Instant.now());
    }

    private String body(int number, long intended) {
        String head = String.format("%010d %016d ", number, intended);
        return (head + "x".repeat(config.payload())).substring(0, config.payload());
    }

    private String many(int n, int threads, boolean publish) throws Exception {
        int first = numbers;
        numbers += publish ? n : 0;
        long started = System.nanoTime();
        spread(n, threads, i -> transaction(publish ? body(first + i, micros()) : null));
        return ",\"seconds\":" + (System.nanoTime() - started) / 1e9 + ",\"first\":" + first;
    }

    private String load(int n, double rate, int threads) throws Exception {
        int first = numbers;
        numbers += n;
        long[] committed = new long[n];
        long start = micros() + 1_000;
        spread(n, threads, i -> {
            long intended = start + Math.round(i / rate * 1e6);
            sleepUntil(intended);
            transaction(body(first + i, intended));
            committed[i] = micros();
        });
        String times = Arrays.stream(committed).mapToObj(Long::toString).collect(Collectors.joining(","));
        return ",\"first\":" + first + ",\"committed\":[" + times + "]";
    }

    private static void sleepUntil(long micros) {
        try {
            TimeUnit.MICROSECONDS.sleep(micros - micros());
        } catch (InterruptedException e) {
            throw new IllegalStateException(e);
        }
    }

    private void transaction(String body) {
        try {
            peer.transaction(orders.getAndIncrement(), body);
        } catch (Exception e) {
            e.printStackTrace();
            System.exit(1);
        }
    }

    /** Does n things, so many at a time, numbered from 0. */
    private static void spread(int n, int threads, IntConsumer what) throws InterruptedException {
        AtomicInteger next = new AtomicInteger();
        List<Thread> all = new ArrayList<>();
        for (int t = 0; t < threads; t++) {
            Thread thread = new Thread(() -> {
                for (int i = next.getAndIncrement(); i < n; i = next.getAndIncrement()) {
                    what.accept(i);
                }
            });
            thread.start();
            all.add(thread);
        }
        for (Thread thread : all) {
            thread.join();
        }
    }
}
